"""Counts this instance's free blocks, which prompts and candidates share. Pure: it only counts."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.prefill_worker.scheduled_request import ScheduledRequest
from alignedserve.protocol.messages import InstanceLimits


class Blocks:
    def __init__(self, limits: InstanceLimits) -> None:
        self._num_all = limits.num_blocks
        # A prompt's blocks must all be saved to the pool. So it gets all of them at the start, and passes none.
        self._span = replace(limits.span, max_step=0)
        # Blocks that the longest prompt needs.
        self.num_for_one = self.needed(limits.max_model_len)
        if self._num_all < self.num_for_one:
            raise ValueError(
                f"num_blocks={self._num_all}: a request of max_model_len={limits.max_model_len} "
                f"needs {self.num_for_one}"
            )
        self.num_free = self._num_all
        # Blocks of prompts that decode instances may pull. They count in the candidates' share.
        self.num_held = 0

    def needed(self, num_tokens: int, num_cached: int = 0) -> int:
        """Returns the number of blocks for `num_tokens` tokens, of which the first `num_cached` already have KV."""
        return self._span.num_held(num_cached, num_tokens)

    def hold(self, request: ScheduledRequest, count: int) -> None:
        request.num_blocks = count
        self.num_free -= count

    def free(self, request: ScheduledRequest) -> None:
        self.num_free += request.num_blocks

    def check(self, num_held: int) -> None:
        if num_held + self.num_free != self._num_all:
            raise RuntimeError(
                f"blocks leaked: {num_held} held + {self.num_free} free != {self._num_all} in all"
            )
