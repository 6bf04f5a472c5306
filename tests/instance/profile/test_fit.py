from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.instance.profile.fit import errors, fit, fit_chunks, fit_held_out, least_squares, split
from alignedserve.instance.profile.grid import grid
from alignedserve.instance.profile.points import Measured, Point
from alignedserve.timing.cost import ExpertCounts, LinearCost
from alignedserve.timing.cost_presets import checked
from tests.instance.profile.profiles import KNOWN, REACH, measured_by

POINTS = grid(REACH)


@pytest.mark.parametrize(("noise", "worst"), [(0.0, 1e-6), (0.03, 0.06)])
def test_a_fit_predicts_points_that_it_has_not_seen(noise: float, worst: float) -> None:
    _, found = fit_held_out(measured_by(KNOWN, POINTS, noise), 1, 1, "made up")
    assert found.keys() == {"decode", "chunk", "both"}
    assert all(error.p95 < worst and error.median <= error.p95 for error in found.values())


def test_every_number_is_found_again() -> None:
    model = fit(measured_by(KNOWN, POINTS, 0.0), 1, 1, "made up")
    assert model.num_near_tokens == KNOWN.num_near_tokens
    for name in ("fixed_s", "token_s", "attention_s", "context_s"):
        assert getattr(model, f"prefill_{name}") == pytest.approx(getattr(KNOWN, f"prefill_{name}"))
    for name in ("decode_attention_s", "decode_far_s"):
        assert getattr(model, name) == pytest.approx(getattr(KNOWN, name))
    for batch in (1, 8, 32, 64, 128, 256):
        assert model.iteration([], [99] * batch) == pytest.approx(KNOWN.iteration([], [99] * batch))


def test_beyond_a_window_nothing_costs_more() -> None:
    measured = measured_by(KNOWN.with_window(1000), POINTS, 0.0)
    model, found = fit_held_out(measured, 1, 1, "made up", window=1000)
    assert model.window == 1000 and max(error.p95 for error in found.values()) < 1e-6
    _, unaware = fit_held_out(measured, 1, 1, "made up")
    assert unaware["decode"].p95 > 0.1


def test_reading_more_than_computing_is_told_apart() -> None:
    known = replace(KNOWN, prefill_context_s=0.0)
    chunks = [each for each in POINTS if each.kind == "chunk"]
    found = fit_chunks(measured_by(known, chunks, 0.0), known.decode_attention_s)
    assert found.pair_s == pytest.approx(known.prefill_attention_s, rel=1e-3)
    assert found.context_s == pytest.approx(0.0, abs=1e-12)


def test_held_out_points_are_a_fifth_and_have_no_part_in_the_fit() -> None:
    measured = measured_by(KNOWN, POINTS, 0.0)
    kept, held_out = split(measured)
    assert sorted(map(id, [*kept, *held_out])) == sorted(map(id, measured))
    assert len(held_out) == pytest.approx(len(measured) / 5, abs=2)
    spoilt = [Measured(each.point, 9.0) if each in held_out else each for each in measured]
    _, found = fit_held_out(spoilt, 1, 1, "made up")
    assert found["decode"].median > 0.5


def test_one_line_is_found_where_there_is_one() -> None:
    known = replace(KNOWN, decode_lines=[LinearCost(2e-3, 1e-5)])
    model = fit(measured_by(known, POINTS, 0.0), 1, 1, "made up")
    assert max(error.p95 for error in errors(model, measured_by(known, POINTS, 0.0)).values()) < 1e-6


def test_no_coefficient_is_negative() -> None:
    columns = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert least_squares(columns, np.array([3.0, 2.0, 1.0])).min() >= 0
    assert least_squares(columns, np.array([3.0, 5.0, 7.0])) == pytest.approx([1.0, 2.0])


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(1, 3000)), min_size=1, max_size=8),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000)), min_size=1, max_size=8),
    st.randoms(use_true_random=False),
)
def test_few_points_and_wild_times_still_give_a_model_that_makes_sense(
    decodes: list[tuple[int, int]], chunks: list[tuple[int, int]], choose: object
) -> None:
    import random

    assert isinstance(choose, random.Random)
    points = [Point(lengths=(length,) * batch) for batch, length in decodes]
    points += [Point(chunks=(chunk,)) for chunk in chunks]
    model = fit([Measured(point, choose.uniform(1e-5, 10)) for point in points], 1, 1, "made up")
    checked(model, "made up")
    assert model.iteration([], [100] * 8) >= model.iteration([], [100])
    assert model.fastest_tbt_s(100) > 0 and model.fastest_ttft_s(1000, 256) > 0


def test_without_one_of_the_kinds_there_is_no_fit() -> None:
    measured = measured_by(KNOWN, POINTS, 0.0)
    with pytest.raises(ValueError, match="no decodes"):
        fit([each for each in measured if each.point.kind == "chunk"], 1, 1, "made up")
    with pytest.raises(ValueError, match="no chunks"):
        fit([each for each in measured if each.point.kind == "decode"], 1, 1, "made up")


MIXTURE = replace(
    KNOWN, expert_counts=ExpertCounts(128, 8), experts_s=2e-2, decode_lines=[LinearCost(3e-3, 1e-5)]
)


@pytest.mark.slow
@pytest.mark.parametrize(("noise", "worst"), [(0.0, 1e-6), (0.03, 0.06)])
def test_reading_more_experts_with_more_tokens_is_found_again(noise: float, worst: float) -> None:
    measured = measured_by(MIXTURE, POINTS, noise)
    model, found = fit_held_out(measured, 1, 1, "made up", ExpertCounts(128, 8))
    assert all(error.p95 < worst for error in found.values())
    assert model.experts_s == pytest.approx(MIXTURE.experts_s, rel=1e-6 if noise == 0 else 0.1)
    checked(model, "made up")


@pytest.mark.slow
def test_lines_alone_do_not_fit_a_mixture() -> None:
    _, found = fit_held_out(measured_by(MIXTURE, POINTS, 0.0), 1, 1, "made up")
    assert found["decode"].p95 > 0.05
