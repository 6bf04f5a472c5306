"""The actions of a decode instance at an iteration boundary, as decided by its schedule."""

from __future__ import annotations

import msgspec

from alignedserve.kv.end_copies import EndCopy
from alignedserve.protocol.messages import Work
from alignedserve.types import RequestKey


class DecodePlan(msgspec.Struct):
    """A struct, because it is faster to create than a dataclass, and each iteration creates one."""

    # Requests that leave immediately without saving KV. They have no blocks any more.
    drops: list[RequestKey] = []
    # Requests with KV to copy here. They have their blocks. `pulled` or `pull_failed` follows.
    pulls: list[Work] = []
    # Prompts without KV that start. They have their blocks and may run in this iteration.
    new_prompts: list[Work] = []
    # Requests that compute all pending tokens, usually one, and sample the next. `sampled` follows.
    run: list[RequestKey] = []
    # Requests that compute a part of their pending tokens, and the number of these. `computed` follows.
    chunks: list[tuple[RequestKey, int]] = []
    # All requests to evict, including those of earlier plans.
    wants_evicted: list[RequestKey] = []
    # Copies before the iteration, in order.
    ends: list[EndCopy] = []
    # Seconds for which nothing runs unless an event occurs, because RT is about to arrive.
    hold_s: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the next plan can be made immediately, without waiting for a wake."""
        return bool(self.run or self.chunks or self.new_prompts)
