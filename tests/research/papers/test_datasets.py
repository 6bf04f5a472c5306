"""Generated lengths have the stated means and standard deviations."""

from __future__ import annotations

from random import Random
from statistics import fmean, pstdev

import pytest

from alignedserve.sim.trace import rate_of
from research.papers.datasets import (
    ACCELGEN_MIX,
    ALL,
    BE_SYNTHETIC,
    SHAREGPT,
    SYNTHETIC,
    Dataset,
    Lognormal,
)

PUBLISHED = [each for each in ALL if not each.source.startswith("assumed")]


@pytest.mark.parametrize("dataset", PUBLISHED, ids=lambda dataset: dataset.name)
def test_the_mean_is_the_published_one(dataset: Dataset) -> None:
    lengths = dataset.lengths(20_000, seed=0)
    for spread, values in (
        (dataset.prompt, [each.prompt for each in lengths]),
        (dataset.output, [each.output for each in lengths]),
    ):
        assert min(values) >= 1
        if isinstance(spread, Lognormal):
            assert max(values) <= spread.longest
            # What is cut off at the longest takes some of the mean.
            assert fmean(values) == pytest.approx(spread.mean, rel=0.12)


def test_deviations_are_the_published_ones() -> None:
    dice = Random(1)
    values = [Lognormal(200.0, 100.0, longest=10**9).draw(dice) for _ in range(20_000)]
    assert pstdev(values) == pytest.approx(100.0, rel=0.05)


def test_the_ranges_of_best_effort_are_those_of_the_paper_s_table() -> None:
    """A mean prompt of 784.14 with a deviation of 151.17, a mean answer of 80.96 with one of 28.23."""
    lengths = BE_SYNTHETIC.lengths(20_000, seed=0)
    assert fmean(each.prompt for each in lengths) == pytest.approx(784.14, rel=0.03)
    assert pstdev([each.prompt for each in lengths]) == pytest.approx(151.17, rel=0.03)
    assert fmean(each.output for each in lengths) == pytest.approx(80.96, rel=0.03)
    assert pstdev([each.output for each in lengths]) == pytest.approx(28.23, rel=0.03)


def test_shares_of_prompts_are_those_of_accelgen() -> None:
    prompts = [each.prompt for each in ACCELGEN_MIX.lengths(20_000, seed=0)]
    assert fmean(prompt <= 512 for prompt in prompts) == pytest.approx(0.34, abs=0.02)
    assert fmean(prompt > 4096 for prompt in prompts) == pytest.approx(0.14, abs=0.02)


def test_one_in_twenty_prompts_is_long() -> None:
    prompts = [each.prompt for each in SYNTHETIC.lengths(20_000, seed=0)]
    assert fmean(prompt >= 1000 for prompt in prompts) == pytest.approx(0.05, abs=0.01)


def test_a_seed_is_the_same_requests_in_the_same_rhythm_at_any_rate() -> None:
    slow, fast = SHAREGPT.arrivals(200, 1.0, seed=3), SHAREGPT.arrivals(200, 4.0, seed=3)
    assert [each.lengths for each in slow] == [each.lengths for each in fast]
    assert [each.time_s for each in fast] == pytest.approx([each.time_s / 4 for each in slow])
    assert rate_of(fast) == pytest.approx(4.0)
    assert SHAREGPT.lengths(20, seed=3) != SHAREGPT.lengths(20, seed=4)
