"""What is possible, compared with cases that can be worked out by hand, and with what policies reach."""

from __future__ import annotations

from random import Random

import pytest

from benchmarks.arena.bound import Part, possible, too_many
from benchmarks.arena.recheck import RECORD, read
from benchmarks.arena.regimes import draw


def parts_of(*works: tuple[float, float, float]) -> list[Part]:
    """Of (begins_s, due_s, seconds)."""
    return [Part(number, *work) for number, work in enumerate(works)]


def test_what_fits_is_not_left_out() -> None:
    """The second one goes before the first, which goes on after it."""
    assert too_many(1.0, parts_of((0, 10, 8), (1, 3, 2))) == set()
    assert too_many(1.0, parts_of((0, 10, 8), (1, 3, 2), (20, 21, 1))) == set()


def test_the_one_that_takes_most_is_left_out() -> None:
    assert too_many(1.0, parts_of((0, 10, 9), (0, 5, 2), (0, 11, 2))) == {0}
    # Twice as fast, all fit.
    assert too_many(2.0, parts_of((0, 10, 9), (0, 5, 2), (0, 11, 2))) == set()


def test_what_is_due_later_delays_nobody() -> None:
    """The longest one is due last."""
    assert too_many(1.0, parts_of((0, 2, 2), (0, 2, 1), (0, 30, 9))) == {0}


def test_all_parts_of_a_request_are_left_out() -> None:
    prompt, answer, other = Part(0, 0, 4, 4), Part(0, 4, 8, 3), Part(1, 0, 4, 1)
    assert too_many(1.0, [prompt, answer, other]) == {0}
    # Its answer would have made the third one late.
    assert too_many(1.0, [prompt, answer, other, Part(2, 4, 6, 2)]) == {0}


@pytest.mark.parametrize("seed", range(40))
def test_whoever_is_not_left_out_is_in_time(seed: int) -> None:
    """In small steps, always the one that is due first."""
    dice = Random(seed)
    parts = parts_of(
        *(
            (begins := dice.randint(0, 30), begins + dice.randint(1, 12), dice.randint(1, 5))
            for _ in range(12)
        )
    )
    left_out = too_many(1.0, parts)
    left = {part: part.seconds for part in parts if part.number not in left_out}
    for second in range(100):
        if begun := [part for part in left if part.begins_s <= second]:
            first = min(begun, key=lambda part: (part.due_s, part.number))
            left[first] -= 1
            if not left[first]:
                assert second + 1 <= first.due_s
                del left[first]
    assert not left


def test_no_policy_reached_more_than_is_possible() -> None:
    """In all recorded scenarios in which no more comes than fits."""
    for number, scores in read(RECORD).items():
        regime = draw(number)
        if regime.is_feasible and not regime.is_overloaded:
            assert max(score.in_time for score in scores.values()) <= possible(regime) + 1e-9, number


def test_what_is_wanted_too_soon_is_not_possible() -> None:
    infeasible = next(regime for regime in map(draw, range(20)) if regime.objectives == "infeasible")
    assert possible(infeasible) == 0.0
    none = next(regime for regime in map(draw, range(20)) if regime.objectives == "none")
    assert possible(none) == 1.0
