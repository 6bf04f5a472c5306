from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.timing.cost import FREE_COPIES
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.timing.estimate import Estimate

OPT_13B = load_cost_model("opt-13b/a100-80gb")


def run(estimate: Estimate, pace: float, num: int, noise: float = 0.0) -> None:
    """Decodes and chunks on a device that takes so many times as long as the model says."""
    choose = random.Random(0)
    for _ in range(num):
        chunks = [(0, choose.randint(1, 2048))] if choose.random() < 0.3 else []
        lengths = [choose.randint(1, 2000) for _ in range(choose.randint(1, 64))]
        predicted_s = estimate.iteration(chunks, lengths)
        seconds = OPT_13B.iteration(chunks, lengths) * pace * choose.uniform(1 - noise, 1 + noise)
        estimate.took(predicted_s, seconds)


def test_at_first_it_is_the_model() -> None:
    assert Estimate(OPT_13B).iteration([(0, 100)], [5]) == OPT_13B.iteration([(0, 100)], [5])


def test_all_that_is_predicted_is_corrected_alike() -> None:
    estimate = Estimate(OPT_13B)
    chunks, lengths = [(0, 64), (64, 32)], [700, 30, 1200]
    for pace in (1.3, 0.6, 2.0):
        run(estimate, pace, num=50)
        assert estimate.pace == pytest.approx(pace, rel=0.02)
        for length in (700, 700, 701):
            assert estimate.alone(length) == estimate.iteration([], [length])
        assert estimate.one_more_chunk(chunks, lengths)(5, 99) == estimate.iteration(
            [*chunks, (5, 99)], lengths
        )
        assert estimate.first_decodes(chunks, lengths)(2) == estimate.iteration(chunks, lengths[:2])


@given(st.floats(0.05, 20))
def test_it_converges_on_a_device_of_any_pace(pace: float) -> None:
    estimate = Estimate(OPT_13B)
    run(estimate, pace, 150)
    assert estimate.pace == pytest.approx(pace, rel=0.02)
    assert estimate.iteration([], [700] * 9) == pytest.approx(
        OPT_13B.iteration([], [700] * 9) * pace, rel=0.02
    )


def test_within_twenty_iterations_it_follows_a_device_that_is_shared_from_here_on() -> None:
    estimate = Estimate(OPT_13B)
    run(estimate, 1.0, 50)
    run(estimate, 2.0, 20)
    assert estimate.pace > 1.7
    run(estimate, 1.0, 25)
    assert estimate.pace < 1.2


def test_noise_moves_it_little() -> None:
    estimate = Estimate(OPT_13B)
    run(estimate, 1.5, 300, noise=0.3)
    assert estimate.pace == pytest.approx(1.5, rel=0.12)


@pytest.mark.parametrize("interruption_s", [0.0, 1.0, 1e6, float("inf")])
def test_an_interruption_leaves_it_as_it_was(interruption_s: float) -> None:
    estimate = Estimate(OPT_13B)
    run(estimate, 1.5, 300)
    for _ in range(2):
        estimate.took(estimate.iteration([], [100]), interruption_s)
    assert estimate.pace == pytest.approx(1.5, rel=0.01)
    run(estimate, 1.5, 20)
    assert estimate.pace == pytest.approx(1.5, rel=0.01)


@given(st.lists(st.floats(0, 1e9), max_size=200))
def test_whatever_is_measured_it_recovers(measured: list[float]) -> None:
    estimate = Estimate(OPT_13B)
    for seconds in measured:
        estimate.took(estimate.iteration([], [100]), seconds)
        assert 0 < estimate.pace < float("inf")
    begin = estimate.pace
    run(estimate, begin * 3, 100)
    assert estimate.pace == pytest.approx(begin * 3, rel=0.02)


def test_an_iteration_of_nothing_teaches_nothing() -> None:
    estimate = Estimate(OPT_13B)
    estimate.took(0.0, 1.0)
    assert estimate.pace == 1.0


@given(st.floats(0.2, 5), st.floats(0, 0.05))
def test_what_an_instance_does_beside_the_engine_comes_on_top(pace: float, outside_s: float) -> None:
    estimate = Estimate(OPT_13B)
    for length in [100, 2000, 700] * 60:
        inside_s = OPT_13B.iteration([], [length]) * pace
        estimate.took(estimate.iteration([], [length]), inside_s + outside_s, outside_s)
    assert estimate.pace == pytest.approx(pace, rel=0.02)
    for chunks, lengths in ([(0, 2048)], []), ([], [1]):
        expected_s = OPT_13B.iteration(chunks, lengths) * pace + outside_s
        assert estimate.iteration(chunks, lengths) == pytest.approx(expected_s, rel=0.02)


def test_one_long_pause_outside_is_not_expected_again() -> None:
    estimate = Estimate(OPT_13B)
    for outside_s in [0.0003] * 50 + [1e6] + [0.0003] * 5:
        inside_s = OPT_13B.iteration([], [100])
        estimate.took(estimate.iteration([], [100]), inside_s + outside_s, outside_s)
    assert estimate.outside_s == pytest.approx(0.0003, rel=0.01)
    assert estimate.pace == pytest.approx(1.0, rel=0.01)


def test_what_recent_iterations_took_beyond_their_prediction_is_known() -> None:
    """One in ten takes three times as long, and later none does."""
    estimate = Estimate(OPT_13B)
    assert estimate.overrun == 1.0
    for number in range(200):
        estimate.took(0.01, 0.03 if number % 10 == 0 else 0.01)
    assert estimate.overrun == pytest.approx(3.0)
    for _ in range(200):
        estimate.took(0.01, 0.009)
    assert estimate.overrun == 1.0


# ---- copies from the pool ----

TOKEN_BYTES = int(OPT_13B.pool_bytes_per_token)


def fetch(estimate: Estimate, pace: float, num: int) -> None:
    """Copies which take this many times as long as the model says."""
    choose = random.Random(0)
    for _ in range(num):
        num_bytes = choose.randint(1, 2000) * TOKEN_BYTES
        estimate.fetched(num_bytes, OPT_13B.channels.fetch.seconds(num_bytes) * pace)


@given(st.floats(0.05, 20))
def test_fetches_converge_on_what_copies_take(pace: float) -> None:
    estimate = Estimate(OPT_13B)
    fetch(estimate, pace, 150)
    expected_s = OPT_13B.channels.fetch.seconds(700 * TOKEN_BYTES) * pace
    assert estimate.fetch(700) == pytest.approx(expected_s, rel=0.02)
    assert estimate.iteration([], [700]) == OPT_13B.iteration([], [700])


@pytest.mark.parametrize("seconds", [0.0, 1e6, float("inf")])
def test_a_copy_that_was_interrupted_leaves_fetches_as_they_were(seconds: float) -> None:
    estimate = Estimate(OPT_13B)
    fetch(estimate, 1.5, 100)
    for _ in range(2):
        estimate.fetched(TOKEN_BYTES, seconds)
    assert estimate.fetch_pace == pytest.approx(1.5, rel=0.01)


def test_copies_that_are_taken_to_be_free_stay_so() -> None:
    estimate = Estimate(replace(OPT_13B, channels=FREE_COPIES))
    estimate.fetched(TOKEN_BYTES, 1.0)
    assert estimate.fetch_pace == 1.0 and estimate.fetch(1000) < 1e-5
