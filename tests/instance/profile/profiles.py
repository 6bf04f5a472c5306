"""Points as a device of known cost would measure them, and profiles made from these."""

from __future__ import annotations

import random
from collections.abc import Sequence

from msgspec.structs import replace

from alignedserve.instance.profile.fit import fit_held_out
from alignedserve.instance.profile.grid import Reach, grid
from alignedserve.instance.profile.points import Measured, Point
from alignedserve.instance.profile.saved import VERSION, Profile
from alignedserve.timing.cost import Channels, CopyChannel, CostModel, LinearCost

REACH = Reach(max_num_seqs=256, max_chunk=2048, max_model_len=8192, num_kv_tokens=500_000)
FACTS = {"model": "tiny", "device": "a device", "dtype": "float32"}
KNOWN = CostModel(
    source="made up",
    kv_bytes_per_token=131072,
    num_kv_tokens=500_000,
    prefill_fixed_s=4e-3,
    prefill_token_s=2.2e-5,
    prefill_attention_s=2.6e-10,
    prefill_context_s=1e-7,
    decode_lines=[LinearCost(5e-3, 2e-6), LinearCost(3e-3, 4e-5), LinearCost(1e-3, 7e-5)],
    decode_attention_s=3e-8,
    decode_far_s=4e-8,
    num_near_tokens=8192,
    num_filling=1.0,
    channels=Channels(*[CopyChannel(0.0, 1e9)] * 4),
)


def measured_by(model: CostModel, points: Sequence[Point], noise: float) -> list[Measured]:
    choose = random.Random(0)
    return [
        Measured(point, model.iteration(point.chunks, point.lengths) * choose.uniform(1 - noise, 1 + noise))
        for point in points
    ]


def profile_of(facts: dict[str, str], reach: Reach = REACH, has_copies: bool = True) -> Profile:
    """Without `has_copies`, it is like one from an earlier version."""
    points = measured_by(KNOWN, grid(reach), 0.02)
    cost, errors = fit_held_out(points, KNOWN.kv_bytes_per_token, reach.num_kv_tokens, "made up")
    if has_copies:
        cost = replace(cost, channels=KNOWN.channels)
    return Profile(VERSION, facts, reach, len(points), errors, 0.0, cost)
