"""How long next turns take, in virtual time, and what becomes of promises."""

from __future__ import annotations

import pytest

from alignedserve.kvpool.return_times import FEW, MAX_ANSWERS, MAX_OWNERS, MAX_S, MIN_S, PRIOR_S, ReturnTimes
from tests.kvpool.allocator_steps import hashes_of


def see(times: ReturnTimes, waits_s: list[float], follows: str = "tool", owner: str = "me") -> None:
    for number, wait_s in enumerate(waits_s):
        said = hashes_of(f"{number:04}{follows}", 9)
        times.ended(said[:8], owner, now=100.0)
        times.came(said, owner, follows, num_found=8, now=100.0 + wait_s)


def test_a_prior_counts_until_a_few_have_come() -> None:
    times = ReturnTimes()
    see(times, [2.0] * (FEW - 1))
    assert times.wait_s("me", "tool") == PRIOR_S["tool"]
    see(times, [2.0])
    assert times.wait_s("me", "tool") == 2.0 and times.wait_s("me", "user") == PRIOR_S["user"]


def test_waits_of_one_owner_change_nothing_for_another() -> None:
    times = ReturnTimes()
    see(times, [5.0] * FEW)
    see(times, [0.05] * 200, owner="other")
    assert (times.wait_s("me", "tool"), times.wait_s("other", "tool")) == (5.0, MIN_S)


def test_owners_that_were_not_seen_for_long_are_forgotten() -> None:
    times = ReturnTimes()
    see(times, [5.0] * FEW)
    for number in range(MAX_OWNERS):
        see(times, [1.0], owner=f"{number}")
    assert times.wait_s("me", "tool") == PRIOR_S["tool"]


def test_nine_of_ten_come_in_time() -> None:
    times = ReturnTimes()
    see(times, [float(each) for each in range(1, 101)])
    assert times.wait_s("me", "tool") == 90.0


def test_old_waits_are_forgotten() -> None:
    times = ReturnTimes()
    see(times, [60.0] * 200)
    see(times, [1.0] * 200)
    assert times.wait_s("me", "tool") == 1.0


@pytest.mark.parametrize(("wait_s", "promised_s"), [(0.001, MIN_S), (10_000.0, MAX_S)])
def test_a_promise_has_bounds(wait_s: float, promised_s: float) -> None:
    times = ReturnTimes()
    see(times, [wait_s] * FEW)
    assert times.wait_s("me", "tool") == promised_s


def test_what_came_says_which_wait_it_was() -> None:
    times = ReturnTimes()
    see(times, [50.0] * FEW, follows="user")
    assert (times.wait_s("me", "user"), times.wait_s("me", "tool")) == (50.0, PRIOR_S["tool"])


def test_the_latest_answer_in_a_prompt_counts_once() -> None:
    times, said = ReturnTimes(), hashes_of("abcdefghi", 9)
    for _ in range(FEW):
        times.ended(said[:2], "me", now=0.0)
        times.ended(said[:5], "me", now=50.0)
        times.came(said, "me", "tool", num_found=5, now=53.0)
        times.came(said[:4], "me", "user", num_found=2, now=60.0)
        times.came(said, "me", "tool", num_found=5, now=70.0)
    assert (times.wait_s("me", "tool"), times.wait_s("me", "user")) == (3.0, 60.0)


@pytest.mark.parametrize(
    ("now", "num_found", "outcome"), [(3.0, 5, "kept"), (3.0, 4, "broken"), (5.0, 5, "expired")]
)
def test_what_became_of_a_promise(now: float, num_found: int, outcome: str) -> None:
    times, said = ReturnTimes(), hashes_of("abcdefghi", 9)
    times.ended(said[:5], "me", now=0.0)
    times.promised(said[4], "me", until=4.0)
    times.expire(min(now, 3.9))
    times.came(said, "me", "tool", num_found, now)
    times.expire(99.0)
    assert dict(times.outcomes) == {outcome: 1}


def test_a_promise_expires_without_a_next_turn_and_the_answer_is_still_learned_from() -> None:
    times, said = ReturnTimes(), hashes_of("abcdefghi", 9)
    for _ in range(FEW):
        times.ended(said[:5], "me", now=0.0)
        times.promised(said[4], "me", until=4.0)
        times.expire(4.0)
        times.came(said, "me", "tool", num_found=0, now=20.0)
    assert dict(times.outcomes) == {"expired": FEW} and times.wait_s("me", "tool") == 20.0


def test_only_the_last_answers_are_remembered() -> None:
    times = ReturnTimes()
    for number in range(MAX_ANSWERS + FEW):
        times.ended([number.to_bytes(32, "big")], "me", now=0.0)
    for number in range(FEW):
        times.came([number.to_bytes(32, "big")], "me", "tool", num_found=1, now=1.0)
    assert times.wait_s("me", "tool") == PRIOR_S["tool"]
    for number in range(FEW, 2 * FEW):
        times.came([number.to_bytes(32, "big")], "me", "tool", num_found=1, now=1.0)
    assert times.wait_s("me", "tool") == 1.0


def test_many_answers_of_one_owner_push_out_its_own() -> None:
    times = ReturnTimes()
    few = [number.to_bytes(32, "big") for number in range(FEW)]
    for last in few:
        times.ended([last], "me", now=0.0)
    for number in range(2 * MAX_ANSWERS):
        times.ended([number.to_bytes(32, "little")], "other", now=0.0)
    # Another owner's next turn is none of mine.
    times.came(few[:1], "other", "tool", num_found=1, now=1.0)
    for last in few:
        times.came([last], "me", "tool", num_found=1, now=2.0)
    assert times.wait_s("me", "tool") == 2.0 and times._num_answers == MAX_ANSWERS - FEW
