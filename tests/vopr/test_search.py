"""The search runs one seed after the other, each aimed at what was seldom visited, or at nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import chain
from random import Random

import pytest

from alignedserve.vopr.history import History
from alignedserve.vopr.outcome import RunOutcome
from alignedserve.vopr.places import ALL_AIMS, Aims, aims_of
from alignedserve.vopr.plan import Plan, make_plan
from alignedserve.vopr.runs.run import history_of, run
from alignedserve.vopr.runs.search import LAG, Drawing, Tried, search


def plan_of(seed: int) -> Plan:
    return make_plan(seed, systems=("island",))


def make(seed: int, aims: Sequence[str]) -> History:
    return history_of(seed, systems=("island",), aims=aims)


@pytest.mark.slow
def test_seeds_are_run_from_the_first_one_on_and_say_what_they_were_aimed_at() -> None:
    tried = list[Tried]()
    search(500, 0.1, plan_of, make, 2, tried.append)
    assert tried
    assert sorted(each.seed for each in tried) == list(range(500, 500 + len(tried)))
    first = min(tried, key=lambda each: each.seed)
    assert run(make(first.seed, first.aims)).visited == first.outcome.visited


def test_aims_are_the_same_however_many_seeds_run_at_a_time() -> None:
    """Seeds end in any order: each is given its aims as soon as those that count have ended."""
    orders = []
    for num_running in (1, 2 * LAG):
        drawing, random, running = Drawing(7), Random(num_running), list[int]()
        aims = list[tuple[str, ...]]()
        for seed in range(7, 7 + 3 * LAG):
            while len(running) >= num_running or not drawing.can_draw(seed):
                ended = running.pop(random.randrange(len(running)))
                visited = Counter({f"{aim} dies": 1 for aim in aims[ended - 7]})
                drawing.has_ended(
                    Tried(ended, aims[ended - 7], RunOutcome(None, 1.0, 0, 0, 0, visited=visited))
                )
            aims.append(drawing.draw(plan_of(5)))
            running.append(seed)
        orders.append(aims)
    assert orders[0] == orders[1]


def drawn(aims: Aims, plan: Plan, num_seeds: int) -> list[tuple[str, ...]]:
    return [aims.draw(plan) for _ in range(num_seeds)]


def test_what_was_seldom_visited_is_aimed_at_most_often() -> None:
    plan = plan_of(5)
    aims, seldom = Aims(Random(1)), "DecodeReport.evicted:router"
    often = {f"{aim} dies": 1 for aim in aims_of(plan) if aim != seldom}
    for _ in range(2000):
        aims.visited(Counter(often))
    draws = drawn(aims, plan, 100)
    assert 10 < draws.count(()) < 50
    assert all(seldom in each for each in draws if each)


def test_what_was_aimed_at_in_vain_is_aimed_at_less() -> None:
    plan = plan_of(5)
    draws = drawn(Aims(Random(2)), plan, 7 * len(aims_of(plan)))
    assert all(len(set(each)) == len(each) for each in draws)
    counts = Counter(chain(*draws))
    assert set(counts) == set(aims_of(plan))
    assert max(counts.values()) < 3 * min(counts.values())


def test_no_seed_is_aimed_at_what_its_system_has_not() -> None:
    plan = next(plan for plan in map(make_plan, range(100)) if plan.num_colocated)
    aims = set(aims_of(plan))
    assert aims < set(ALL_AIMS)
    assert not any(aim.startswith(("Prefill", "Stage", "TakeRole")) for aim in aims)
