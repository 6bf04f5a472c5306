"""As many jobs as can be are in time: against all choices."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduling.policies.aligned.router.prompts import most_in_time

# Numbers of which sums are exact.
eighths = st.integers(0, 80).map(lambda number: number / 8)


def are_in_time(jobs: Sequence[tuple[float, float]], begin_s: float) -> bool:
    now = begin_s
    for due_s, seconds in jobs:
        now += seconds
        if now > due_s:
            return False
    return True


@given(st.lists(st.tuples(eighths, eighths), max_size=8), eighths)
def test_no_other_choice_has_more_of_them_in_time(jobs: list[tuple[float, float]], begin_s: float) -> None:
    jobs.sort()
    chosen = most_in_time(jobs, begin_s)
    assert are_in_time([jobs[number] for number in sorted(chosen)], begin_s)
    for count in range(len(chosen) + 1, len(jobs) + 1):
        assert not any(are_in_time(some, begin_s) for some in combinations(jobs, count))


def test_the_longest_is_left_out() -> None:
    assert most_in_time([(3.0, 1.0), (4.0, 3.0), (5.0, 2.0)], 1.0) == {0, 2}
