"""The search runs one seed after the other."""

from __future__ import annotations

from alignedserve.vopr.run import history_of
from alignedserve.vopr.search import search


def test_seeds_are_run_from_the_first_one_on() -> None:
    seeds = list[int]()
    search(500, 0.1, history_of, 2, lambda tried: seeds.append(tried.seed))
    assert seeds
    assert sorted(seeds) == list(range(500, 500 + len(seeds)))
