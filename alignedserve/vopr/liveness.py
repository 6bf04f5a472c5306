"""Within which time everything ends."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.vopr.plan import Plan
from alignedserve.vopr.speed import cost_of

# Once there is calm, some request gets a token or ends every so many seconds.
STANDSTILL_S = 600.0
# Every open request ends within so many seconds, and so many times as long as all would take one after the other.
LIVENESS_S = 600.0
LIVENESS_TIMES = 3.0
# A run that takes more events than this in so many virtual seconds goes in circles.
MAX_EVENTS, WINDOW_S = 20_000, 10.0


def patience_s(plan: Plan, lengths: Iterable[tuple[int, int]]) -> float:
    """By then every request has ended, though each might be alone, and have begun anew. `lengths`: of prompts and
    answers."""
    cost = cost_of(plan)
    alone_s = sum(
        cost.fastest_ttft_s(prompt_len, plan.max_num_batched_tokens)
        + output_len * cost.fastest_tbt_s(prompt_len)
        for prompt_len, output_len in lengths
    )
    return LIVENESS_S + LIVENESS_TIMES * alone_s
