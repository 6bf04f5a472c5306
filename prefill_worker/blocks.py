"""How many blocks of this instance are free: prompts and candidates share them. Pure: it only counts."""

from __future__ import annotations

from dataclasses import replace

from alignedserve.prefill_worker.scheduled_request import ScheduledRequest
from alignedserve.protocol.messages import InstanceLimits


class Blocks:
    def __init__(self, limits: InstanceLimits) -> None:
        self._num_all = limits.num_blocks
        # All blocks of a prompt that is computed are on their way to the pool: it gets them at once, and passes none.
        self._span = replace(limits.span, max_step=0)
        # The number of blocks that the longest prompt needs.
        self.num_for_one = self.needed(limits.max_model_len)
        if self._num_all < self.num_for_one:
            raise ValueError(
                f"num_blocks={self._num_all}: a request of max_model_len={limits.max_model_len} "
                f"needs {self.num_for_one}"
            )
        self.num_free = self._num_all
        # The number of blocks of prompts that decode instances may pull: they count in the share of candidates.
        self.num_held = 0

    def needed(self, num_tokens: int, num_cached: int = 0) -> int:
        """The number of blocks for so many tokens, where the first `num_cached` have KV already."""
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
