"""How many islands are wanted, in virtual time."""

from __future__ import annotations

from alignedserve.launch.growth import CALM_S, ENOUGH_OBJECTIVES, SHORT_S, Growth, LatestLoad, leaving

MISSES = LatestLoad(num_met=9, num_missed=1, busy=1.0)
MEETS = LatestLoad(num_met=99, num_missed=1, busy=1.0)
LATE = LatestLoad(are_late=True, busy=1.0)
IDLE = LatestLoad()


class Watched:
    """Looks each second; the islands that are wanted come at once, unless `most_there` says otherwise."""

    def __init__(self, least: int, most: int, at_first: int = 1) -> None:
        self.growth = Growth(least, most, at_first)
        self.now = 0.0
        self.most_there = most

    def see(self, seen: LatestLoad, seconds: float) -> int:
        for _ in range(int(seconds)):
            self.now += 1
            self.growth.look(self.now, min(self.growth.wanted, self.most_there), seen)
        return self.growth.wanted


def test_at_first_as_many_are_wanted_as_are_there_within_the_limits() -> None:
    assert [Growth(2, 4, at_first).wanted for at_first in (1, 3, 6)] == [2, 3, 4]


def test_one_more_at_a_time_while_objectives_are_missed() -> None:
    watched = Watched(1, 4)
    assert watched.see(MISSES, SHORT_S) == 1
    assert watched.see(MISSES, 1) == 2
    assert watched.see(MISSES, SHORT_S) == 2
    assert watched.see(MISSES, 1 + SHORT_S + 1) == 4
    assert watched.see(MISSES, 10 * SHORT_S) == 4


def test_a_few_misses_and_a_short_burst_of_them_are_nothing() -> None:
    watched = Watched(1, 4)
    assert watched.see(MEETS, 10 * SHORT_S) == 1
    watched.see(IDLE, SHORT_S)
    assert watched.see(LatestLoad(num_missed=ENOUGH_OBJECTIVES - 1), 1) == 1
    assert watched.see(IDLE, 10 * SHORT_S) == 1


def test_jobs_that_would_be_late_all_the_while_want_one_more() -> None:
    watched = Watched(1, 4)
    watched.see(LATE, SHORT_S - 1)
    watched.see(IDLE, 1)
    assert watched.see(LATE, SHORT_S - 1) == 1
    assert watched.see(LATE, 2) == 2


def test_what_is_on_its_way_may_be_enough() -> None:
    watched = Watched(1, 4)
    watched.most_there = 1
    assert watched.see(MISSES, 20 * SHORT_S) == 2


def test_one_fewer_when_the_others_would_be_enough() -> None:
    watched = Watched(1, 4, at_first=3)
    # 3 islands that are 50 % busy would be 2 of 75 %; those that are 40 % busy, 2 of 60 %.
    assert watched.see(LatestLoad(num_met=10, busy=0.5), 3 * CALM_S) == 3
    assert watched.see(LatestLoad(num_met=10, busy=0.3), CALM_S / 3) == 3
    assert watched.see(LatestLoad(num_met=10, busy=0.3), CALM_S / 3) == 2
    # Two that are 45 % busy would be one of 90 %.
    assert watched.see(LatestLoad(num_met=10, busy=0.45), 3 * CALM_S) == 2
    assert watched.see(IDLE, 3 * CALM_S) == 1


def test_never_fewer_than_there_should_be() -> None:
    assert Watched(2, 4, at_first=3).see(IDLE, 10 * CALM_S) == 2


def test_nothing_is_given_back_while_jobs_are_late_or_objectives_missed() -> None:
    watched = Watched(1, 2, at_first=2)
    assert watched.see(LatestLoad(are_late=True), 2 * CALM_S) == 2
    assert watched.see(LatestLoad(num_met=9, num_missed=1), 2 * CALM_S) == 2


def test_what_was_wanted_and_never_came_is_not_wanted_for_ever() -> None:
    watched = Watched(1, 4)
    watched.most_there = 1
    assert watched.see(MISSES, SHORT_S + 2) == 2
    assert watched.see(IDLE, CALM_S + SHORT_S + 2) == 1


def test_more_than_the_limit_is_said_but_not_wanted() -> None:
    watched = Watched(1, 2, at_first=2)
    watched.see(MISSES, SHORT_S + 1)
    assert (watched.growth.wanted, watched.growth.wanted_without_limit) == (2, 3)
    watched.see(MEETS, SHORT_S)
    assert watched.growth.wanted_without_limit == 2


def test_the_newest_are_given_back_and_kept_again_when_others_are_lost() -> None:
    assert leaving([0, 1, 2], [], wanted=3) == set()
    assert leaving([0, 1, 2], [], wanted=1) == {1, 2}
    # 1 began to leave when 2 was not there
    assert leaving([0, 1, 2], [1], wanted=2) == {1}
    assert leaving([1, 2], [1], wanted=2) == set()
    assert leaving([1], [1], wanted=2) == set()


def test_while_none_is_there_none_is_given_up() -> None:
    watched = Watched(1, 4, at_first=3)
    watched.most_there = 0
    assert watched.see(IDLE, 3 * CALM_S) == 3
