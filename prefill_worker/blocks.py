"""Counts this instance's free blocks, and the requests that hold them: prompts and candidates. Pure: it only counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from alignedserve.prefill_worker.scheduled_request import ScheduledRequest, ScheduledRequests
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.types import RequestKey


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


class RequestTable:
    """Requests of one kind. Those that wait hold no blocks, and those that have started hold theirs."""

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        # In order of arrival in the state.
        self._waiting: ScheduledRequests = {}
        self._started: ScheduledRequests = {}
        # Read-only views for other code.
        self.waiting: Mapping[RequestKey, ScheduledRequest] = self._waiting
        self.started: Mapping[RequestKey, ScheduledRequest] = self._started

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._waiting or key in self._started

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    @property
    def num_blocks(self) -> int:
        return sum(request.num_blocks for request in self._started.values())

    def drop_waiting(self) -> None:
        self._waiting.clear()

    def _leave(self, key: RequestKey) -> None:
        self._blocks.free(self._started.pop(key))
