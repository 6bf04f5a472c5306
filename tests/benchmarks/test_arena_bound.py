"""What is possible, compared with cases that can be worked out by hand, and with what policies reach."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from random import Random

import pytest

from benchmarks.arena.bound import Part, num_too_many, possible
from benchmarks.arena.recheck import RECORD, read
from benchmarks.arena.regimes import draw


def parts_of(*works: tuple[float, float, float]) -> list[Part]:
    """Parts of different requests. A work is (begins_s, due_s, seconds)."""
    return [Part(number, *work) for number, work in enumerate(works)]


def test_none_is_late_if_all_fit() -> None:
    """The second one goes before the first, which goes on after it."""
    assert num_too_many(1.0, parts_of((0, 10, 8), (1, 3, 2))) == 0
    assert num_too_many(1.0, parts_of((0, 10, 8), (1, 3, 2), (20, 21, 1))) == 0


def test_as_many_are_late_as_the_excess_needs() -> None:
    assert num_too_many(1.0, parts_of((0, 10, 9), (0, 5, 2), (0, 11, 2))) == 1
    # Twice as fast, all fit.
    assert num_too_many(2.0, parts_of((0, 10, 9), (0, 5, 2), (0, 11, 2))) == 0
    assert num_too_many(1.0, parts_of(*[(0, 4, 2)] * 5)) == 3


def test_an_earlier_long_one_need_not_be_late() -> None:
    assert num_too_many(1.0, parts_of((0, 11, 10), (10, 12, 2), (10, 12, 2))) == 1


def test_busy_times_are_counted_together() -> None:
    assert num_too_many(1.0, parts_of((0, 2, 2), (0, 2, 2), (10, 12, 2), (10, 12, 2))) == 2


def test_both_parts_of_a_request_leave_with_it() -> None:
    prompt, answer = Part(0, 0, 4, 3), Part(0, 0, 8, 3)
    assert num_too_many(1.0, [prompt, answer, Part(1, 0, 8, 2), Part(2, 0, 8, 5)]) == 1


def _is_feasible(parts: Sequence[Part]) -> bool:
    """In steps of a second, always the one that is due first."""
    left = {part: part.seconds for part in parts}
    for second in range(60):
        if begun := [part for part in left if part.begins_s <= second]:
            first = min(begun, key=lambda part: (part.due_s, part.number))
            left[first] -= 1
            if not left[first]:
                if second + 1 > first.due_s:
                    return False
                del left[first]
    return not left


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_leaves_fewer_late(seed: int) -> None:
    dice = Random(seed)
    parts = parts_of(
        *((begins := dice.randint(0, 12), begins + dice.randint(3, 10), dice.randint(1, 5)) for _ in range(7))
    )
    fewest = next(
        count
        for count in range(len(parts) + 1)
        if any(map(_is_feasible, combinations(parts, len(parts) - count)))
    )
    assert num_too_many(1.0, parts) <= fewest


def test_no_policy_reached_more_than_is_possible() -> None:
    """In all recorded scenarios in which real time can be late."""
    for number, scores in read(RECORD).items():
        regime = draw(number)
        if regime.is_feasible:
            assert max(score.in_time for score in scores.values()) <= possible(regime) + 1e-9, number


def test_what_is_wanted_too_soon_is_not_possible() -> None:
    infeasible = next(regime for regime in map(draw, range(20)) if regime.objectives == "infeasible")
    assert possible(infeasible) < 0.5
    none = next(regime for regime in map(draw, range(20)) if regime.objectives == "none")
    assert possible(none) == 1.0
