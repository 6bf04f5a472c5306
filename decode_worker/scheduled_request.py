"""A request on a decode instance, as its schedule sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from alignedserve.kv.held import Held
from alignedserve.protocol.messages import Work
from alignedserve.scheduling.forecast import UNKNOWN_OUTPUT, length_beyond
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import InstanceId, RequestKey


@dataclass(eq=False, slots=True)
class ScheduledRequest(Held):
    work: Work
    # The prefill instance that staged its KV; None if it comes from the pool.
    source: InstanceId | None
    # The number of its batch; 0 if it has none.
    batch: int
    # Tokens of its prompt and output.
    num_tokens: int
    # Tokens with KV.
    num_cached: int
    # The most tokens that can ever need KV.
    max_cached: int
    is_rt: bool
    # The part of its tokens that an iteration does not pay for, because others read the same KV: see CostModel.
    num_saved: int = 0
    # The number of the last iteration for which it was planned.
    last_run: int = 0
    # The hashes of its first blocks, which it may share with prompts that have the same prefix.
    block_hashes: Sequence[bytes] = ()
    # Whether it shares blocks from both ends, or misses some: see `shared_ends.py`.
    shares: bool = False
    # Whether it waits for another request with the same prefix: see `instance/prefix_dedup.py`.
    is_following: bool = False
    # When the iteration began that sampled its first token, in seconds; None if that was elsewhere, or is to come.
    first_s: float | None = None
    # Free for use by the policy.
    mark: Any = None

    # Derived from the work, which does not change. They are read many times per iteration.
    key: RequestKey = field(init=False)
    deadlines: Deadlines = field(init=False)
    num_prompt: int = field(init=False)
    # Tokens with KV in the pool.
    num_pooled: int = field(init=False)

    def __post_init__(self) -> None:
        self.key, self.deadlines = self.work.request.key, self.work.deadlines
        self.num_prompt, self.num_pooled = len(self.work.request.prompt), self.work.num_cached

    def compute_instead(self) -> None:
        """Lets a candidate get none of its KV from the pool."""
        self.work = replace(self.work, num_cached=0, blocks=[])
        self.num_cached = self.num_pooled = 0

    @property
    def owner(self) -> str:
        return self.work.request.owner

    @property
    def is_returning(self) -> bool:
        return self.num_pooled > 0 and not self.work.is_first

    @property
    def is_embedding(self) -> bool:
        return self.work.request.is_embedding

    @property
    def num_computed(self) -> int:
        return self.num_cached

    @property
    def num_pending(self) -> int:
        return self.num_tokens - self.num_cached

    @property
    def num_read(self) -> int:
        """Its length for the cost model."""
        return self.num_tokens - self.num_saved

    @property
    def num_output(self) -> int:
        """Tokens of its answer, which is also the index of the next one."""
        return self.num_tokens - self.num_prompt

    @property
    def num_brought(self) -> int:
        """The number of tokens of its answer with which it arrived here."""
        return len(self.work.output)

    @property
    def num_left(self) -> int:
        """The expected number of tokens that its answer still lacks."""
        num_output = self.num_tokens - self.num_prompt
        length = length_beyond(self.work.predicted_len or UNKNOWN_OUTPUT, num_output)
        return max(min(length - num_output, self.max_cached + 1 - self.num_tokens), 1)

    def allowance_s(self, now: float) -> float:
        """Returns the seconds that the next iteration may take for the sake of this RT request."""
        return self.deadlines.allowance_s(self.num_tokens - self.num_prompt, now)

    def slack_s(self, now: float) -> float:
        """Returns the seconds until its next token is due."""
        return self.deadlines.slack_s(self.num_tokens - self.num_prompt, now)

    def stream_slack_s(self, now: float) -> float:
        """Returns the same, had its first token been due when it was sampled. A first token that was early does not
        allow a pause after it (`router/clock.py`)."""
        if self.first_s is None:
            return self.slack_s(now)
        return self.first_s + self.num_output * self.deadlines.tbt_s - now

    def is_lost(self, now: float) -> bool:
        return self.deadlines.is_lost(self.num_tokens - self.num_prompt, now)


ScheduledRequests = dict[RequestKey, ScheduledRequest]


def scheduled_request(
    work: Work, source: InstanceId | None, batch: int, max_model_len: int, block_hashes: Sequence[bytes] = ()
) -> ScheduledRequest:
    key, request = work.request.key, work.request
    num_tokens = len(request.prompt) + len(work.output)
    room = max_model_len - len(request.prompt)
    max_cached = len(request.prompt) + min(request.params.max_tokens or room, room) - 1
    if request.is_embedding:
        max_cached = len(request.prompt)
    if not 0 <= work.num_cached < num_tokens <= max_cached:
        raise ValueError(
            f"request {key}: {work.num_cached} tokens cached, {num_tokens} known, at most {max_cached} to cache: "
            "must ascend"
        )
    return ScheduledRequest(
        work,
        source,
        batch,
        num_tokens,
        work.num_cached,
        max_cached,
        work.deadlines.is_rt,
        block_hashes=block_hashes,
    )
