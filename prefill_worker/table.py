"""The requests of one kind on this instance, prompts or candidates, and their blocks. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from alignedserve.instance.memory import BlockManager
from alignedserve.prefill_worker.scheduled_request import ScheduledRequest, ScheduledRequests
from alignedserve.types import RequestKey


class PrefillTable:
    """Those that wait hold no blocks, and those that have started hold theirs."""

    def __init__(self, memory: BlockManager) -> None:
        self._memory = memory
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

    def needed(self, num_tokens: int, num_cached: int = 0) -> int:
        """Returns the number of blocks for `num_tokens` tokens, of which the first `num_cached` already have KV."""
        return self._memory.span.num_held(num_cached, num_tokens)

    def _reserve(self, request: ScheduledRequest, num_tokens: int, num_cached: int) -> None:
        span = self._memory.span
        if not self._memory.reserve(request, span.num_columns(num_tokens), span.num_passed(num_cached)):
            needed = self.needed(num_tokens, num_cached)
            raise RuntimeError(
                f"request {request.key}: {needed} blocks are planned, and {self._memory.num_free} are free"
            )

    def drop_waiting(self) -> None:
        self._waiting.clear()

    def _leave(self, key: RequestKey) -> None:
        self._memory.free(self._started.pop(key))
