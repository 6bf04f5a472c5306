"""How many prompt tokens an iteration may compute beside its decodes. Pure."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.timing.estimate import Estimate


def tokens_beside(
    at: DecodeBoundary, estimate: Estimate | None, lengths: Sequence[int], taken_s: float = 0.0
) -> int:
    """Returns the number of prompt tokens for which an iteration has time beside decodes of these lengths, within the
    tightest TBT objective of the running requests (Sarathi-Serve). Other work takes `taken_s` of that time. Returns at
    least one block, so that prompts make progress."""
    tightest_s = min((request.deadlines.tbt_s for request in at.running), default=math.inf)
    return tokens_within(at, estimate, lengths, tightest_s - taken_s, num_least=at.limits.block_size)


def tokens_within(
    at: DecodeBoundary,
    estimate: Estimate | None,
    lengths: Sequence[int],
    bound_s: float,
    num_least: int,
    num_before: int = 0,
) -> int:
    """Returns the number of prompt tokens, in whole blocks, with which an iteration that decodes these lengths takes at
    most `bound_s`. The tokens follow `num_before` tokens of the same prompt. Returns at least `num_least`, if the
    iteration may have that many."""
    most, block_size = at.num_tokens_left, at.limits.block_size
    if estimate is None or math.isinf(bound_s):
        return most
    predict = estimate.one_more_chunk([], lengths)

    def seconds(num_blocks: int) -> float:
        return predict(num_before, num_blocks * block_size)

    num_blocks = bisect_right(range(1, most // block_size + 1), bound_s, key=seconds)
    return min(max(num_blocks * block_size, num_least), most)
