"""In virtual time: requests that exceed their predicted length."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from alignedserve.scheduling.forecast import FORGIVEN_S, MAX_LEVEL, Forecast


def test_a_forecast_that_holds_changes_nothing() -> None:
    forecast = Forecast(10)
    assert not any(forecast.advance(count, now=float(count)) for count in range(10))
    assert (forecast.length, forecast.level(9.0)) == (10, 0)


def test_one_that_is_exceeded_doubles_and_demotes() -> None:
    forecast = Forecast(10)
    assert forecast.advance(10, now=1.0)
    assert (forecast.length, forecast.level(1.0)) == (20, 1)
    assert not forecast.advance(19, now=2.0)
    assert forecast.advance(20, now=3.0)
    assert (forecast.length, forecast.level(3.0)) == (40, 2)


def test_what_is_unknown_cannot_be_exceeded() -> None:
    forecast = Forecast()
    assert not forecast.advance(5000, now=1.0)
    assert forecast.level(1.0) == 0


def test_a_demotion_is_forgiven_one_level_at_a_time() -> None:
    forecast = Forecast(1)
    for count in (1, 2, 4):
        forecast.advance(count, now=5.0)
    assert forecast.level(5.0) == 3
    assert forecast.level(5.0 + 1.5 * FORGIVEN_S) == 2
    assert forecast.level(5.0 + 99 * FORGIVEN_S) == 0
    forecast.advance(8, now=5.0 + 99 * FORGIVEN_S)
    assert forecast.level(5.0 + 99 * FORGIVEN_S) == 1


def test_several_doublings_at_once_are_one_demotion() -> None:
    forecast = Forecast(3)
    assert forecast.advance(50, now=0.0)
    assert (forecast.length, forecast.level(0.0)) == (96, 1)


@given(length=st.integers(1, 5000), true=st.integers(1, 20_000), step=st.integers(1, 300))
def test_it_is_always_ahead_and_never_more_than_twice_the_truth(length: int, true: int, step: int) -> None:
    forecast = Forecast(length)
    for count in range(step, true, step):
        forecast.advance(count, now=count * 0.01)
        assert forecast.length > count
        assert 0 <= forecast.level(count * 0.01) <= MAX_LEVEL
    assert forecast.length <= max(length, 2 * true)
