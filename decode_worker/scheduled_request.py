"""A request at a decode instance, as its schedule sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.protocol.messages import Work
from alignedserve.scheduling.forecast import UNKNOWN_OUTPUT, length_beyond
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import InstanceId, RequestKey


@dataclass(eq=False, slots=True)
class ScheduledRequest:
    work: Work
    # the prefill instance that has it staged; None: the pool
    source: InstanceId | None
    # which batch it came with; a candidate request belongs to the one that runs when it is admitted
    batch: int
    # prompt and output
    num_tokens: int
    # tokens whose KV exists
    num_cached: int
    # tokens whose KV it will ever need
    max_cached: int
    is_rt: bool
    num_blocks: int = 0
    # the last iteration of which it was part
    last_run: int = 0
    # of its first blocks, those that it may share with prompts that begin alike
    names: Sequence[bytes] = ()
    # for another that begins alike: see `instance/prefix_dedup.py`
    is_following: bool = False
    # the policy's own
    mark: Any = None

    @property
    def key(self) -> RequestKey:
        return self.work.request.key

    @property
    def deadlines(self) -> Deadlines:
        return self.work.deadlines

    @property
    def num_computed(self) -> int:
        return self.num_cached

    @property
    def num_pooled(self) -> int:
        """Tokens whose KV the pool has."""
        return self.work.num_cached

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_cached

    @property
    def num_output(self) -> int:
        """Tokens of its answer; also the number of the next one."""
        return self.num_tokens - len(self.work.request.prompt)

    @property
    def num_left(self) -> int:
        """Tokens that its answer will still have, as far as is known."""
        length = length_beyond(self.work.predicted_len or UNKNOWN_OUTPUT, self.num_output)
        return max(min(length - self.num_output, self.max_cached + 1 - self.num_tokens), 1)

    def allowance_s(self, now: float) -> float:
        """What the next iteration may take for its sake, of real time."""
        return self.work.deadlines.allowance_s(self.num_output, now)

    def is_lost(self, now: float) -> bool:
        return self.work.deadlines.is_lost(self.num_output, now)


ScheduledRequests = dict[RequestKey, ScheduledRequest]


def scheduled_request(
    work: Work, source: InstanceId | None, batch: int, max_model_len: int, names: Sequence[bytes] = ()
) -> ScheduledRequest:
    key, request = work.request.key, work.request
    num_tokens = len(request.prompt) + len(work.output)
    room = max_model_len - len(request.prompt)
    max_cached = len(request.prompt) + min(request.params.max_tokens or room, room) - 1
    if not 0 <= work.num_cached < num_tokens <= max_cached:
        raise ValueError(
            f"request {key}: {work.num_cached} tokens cached, {num_tokens} known, at most {max_cached} to cache: "
            "must ascend"
        )
    return ScheduledRequest(
        work, source, batch, num_tokens, work.num_cached, max_cached, work.deadlines.is_rt, names=names
    )
