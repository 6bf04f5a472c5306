"""How much time iterations save if requests of similar length run together."""

from __future__ import annotations

import pytest

from alignedserve.scheduling.policies.aligned.router.batches import BATCHES_COST, _gain
from alignedserve.timing.cost import Attention
from alignedserve.timing.cost_presets import load_cost_model

COST = load_cost_model("opt-13b/a100-80gb")


@pytest.mark.parametrize(("attention", "least", "most"), [("balanced", 0.0, 0.0), ("padded", 0.15, 0.5)])
def test_it_is_what_the_kernel_loses_by_unlike_lengths(
    attention: Attention, least: float, most: float
) -> None:
    lengths = [*[300] * 32, *[3000] * 32]
    assert least <= round(_gain(COST.with_attention(attention), lengths), 9) <= most
    assert least == 0.0 or least > BATCHES_COST


def test_equal_lengths_gain_nothing_with_any_kernel() -> None:
    assert _gain(COST.with_attention("padded"), [700] * 20) == pytest.approx(0.0)
    assert _gain(COST.with_attention("padded"), [700, 900]) == pytest.approx(0.0)
