"""How long everything takes. Iterations take about a second, so an hour of a busy island has only thousands of them.
Copies take as long in proportion as the plan says."""

from __future__ import annotations

from alignedserve.timing.cost import Channels, CopyChannel, CostModel, LinearCost
from alignedserve.vopr.plan import Plan

KV_BYTES_PER_TOKEN = 1 << 20


def prefill_token_s(plan: Plan) -> float:
    return plan.iteration_s / 100


def cost_of(plan: Plan) -> CostModel:
    copy_s = max(plan.copy_iterations * plan.iteration_s, 1e-6)
    channel = CopyChannel(1e-5, 100 * KV_BYTES_PER_TOKEN / copy_s)
    return CostModel(
        source="made up",
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        num_kv_tokens=plan.decode_blocks * plan.block_size,
        prefill_fixed_s=0.3 * plan.iteration_s,
        prefill_token_s=prefill_token_s(plan),
        prefill_attention_s=1e-6 * plan.iteration_s,
        decode_lines=[LinearCost(plan.iteration_s, 0.01 * plan.iteration_s)],
        decode_attention_s=(1e-4 if plan.is_padded else 1e-5) * plan.iteration_s,
        attention="padded" if plan.is_padded else "balanced",
        num_filling=1.0,
        channels=Channels(save=channel, stage=channel, admit=channel, fetch=channel),
    )
