"""Whether something still answers, as far as its callers know."""

from __future__ import annotations

from alignedserve.store.liveness import Liveness


def test_it_is_silent_when_those_who_wait_hear_nothing() -> None:
    hearing = Liveness(3)
    for _ in range(9):
        # nobody asks
        hearing.tick()
    hearing.asked()
    hearing.tick()
    hearing.asked()
    hearing.tick()
    assert not hearing.is_silent
    hearing.tick()
    assert hearing.is_silent
    # it was only slow
    hearing.answered()
    assert not hearing.is_silent and hearing.is_asked
    hearing.tick()
    hearing.answered()
    assert not hearing.is_silent and not hearing.is_asked


def test_after_somebody_has_given_up_one_at_a_time_tries() -> None:
    hearing = Liveness(3)
    hearing.asked()
    hearing.given_up()
    assert not hearing.is_silent
    hearing.asked()
    assert hearing.is_silent
    hearing.answered()
    hearing.asked()
    assert not hearing.is_silent
