"""A request on a prefill instance, as its schedule sees it. The states of a prompt, and of a candidate:

    WAITING -> LOADING -> COMPUTING -> SAVING -> SAVED -> gone
     ^  '-------------------^  |
     '------- PREEMPTING <-----'
    WAITING -> STAGING -> STAGED -> gone

An aborted request that is WAITING is gone at once, and one that is STAGED when the staging buffer lets it go. From any
other state it becomes ABORTED. It is gone when no copy uses its blocks, and no decode instance may pull them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

from msgspec.structs import replace

from alignedserve.kv.held import Held
from alignedserve.protocol.messages import Work
from alignedserve.timing.deadlines import Deadlines
from alignedserve.types import RequestKey


class PromptState(Enum):
    # Has no blocks.
    WAITING = auto()
    # KV that only the pool has is being copied from there.
    LOADING = auto()
    COMPUTING = auto()
    # All of it is computed.
    SAVING = auto()
    # All of its KV is in the pool. It stays while a decode instance may pull it from here.
    SAVED = auto()
    # Its computed KV is being saved to the pool. Then it waits again.
    PREEMPTING = auto()
    STAGING = auto()
    STAGED = auto()
    # Aborted, ended or failed, but its blocks may be under a copy.
    ABORTED = auto()


# The states that may follow each state: the drawing above.
NEXT: dict[PromptState, tuple[PromptState, ...]] = {
    PromptState.WAITING: (PromptState.LOADING, PromptState.COMPUTING, PromptState.STAGING),
    PromptState.LOADING: (PromptState.COMPUTING, PromptState.ABORTED),
    PromptState.COMPUTING: (PromptState.SAVING, PromptState.PREEMPTING, PromptState.ABORTED),
    PromptState.SAVING: (PromptState.SAVED, PromptState.ABORTED),
    PromptState.SAVED: (PromptState.ABORTED,),
    PromptState.PREEMPTING: (PromptState.WAITING, PromptState.ABORTED),
    PromptState.STAGING: (PromptState.STAGED, PromptState.ABORTED),
    PromptState.STAGED: (),
    # An abort may be repeated.
    PromptState.ABORTED: (PromptState.ABORTED,),
}


@dataclass(eq=False, slots=True)
class ScheduledRequest(Held):
    work: Work
    # Tokens that still lack KV.
    num_pending: int = 0
    state: PromptState = PromptState.WAITING
    # When it was first in a plan, in seconds on the instance's clock.
    since_s: float = math.inf
    # The hashes of its first blocks, which it may share.
    block_hashes: Sequence[bytes] = ()
    # Whether it waits for another request with the same prefix: see `instance/prefix_dedup.py`.
    is_following: bool = False
    # Whether its KV is computed and decode instances may pull it from its blocks: see `staging.py`.
    is_held: bool = False

    @property
    def key(self) -> RequestKey:
        return self.work.request.key

    @property
    def owner(self) -> str:
        return self.work.request.owner

    @property
    def is_rt(self) -> bool:
        return self.work.deadlines.is_rt

    @property
    def deadlines(self) -> Deadlines:
        return self.work.deadlines

    @property
    def ttft_s(self) -> float | None:
        return self.work.request.ttft_s

    @property
    def num_output(self) -> int:
        return len(self.work.output)

    @property
    def predicted_len(self) -> int:
        return self.work.predicted_len

    @property
    def num_tokens(self) -> int:
        return num_tokens(self.work)

    @property
    def num_computed(self) -> int:
        return self.num_tokens - self.num_pending

    @property
    def has_slot(self) -> bool:
        return self.state in (PromptState.LOADING, PromptState.COMPUTING)

    def enter(self, state: PromptState) -> None:
        """Raises RuntimeError if the state can't follow the present one."""
        if state not in NEXT[self.state]:
            raise RuntimeError(f"request {self.key}: to enter {state.name}, but it is {self.state.name}")
        self.state = state

    def preempt(self) -> None:
        """Returns the prompt to the waiting state as it loses its blocks. Its computed KV is in the pool, except for an
        embedding."""
        self.enter(PromptState.WAITING)
        if self.work.request.is_embedding:
            self.num_pending = self.num_tokens
        self.work = replace(self.work, num_cached=self.num_computed)
        self.block_hashes = ()


ScheduledRequests = dict[RequestKey, ScheduledRequest]


def num_tokens(work: Work) -> int:
    return len(work.request.prompt) + len(work.output)
