"""A prefill instance between two iterations, as its policy sees it, and the plan that the policy's calls build.

Only what fits is planned. If a call does not fit, the policy is wrong, and it raises an error with both numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter

from alignedserve.instance.memory import BlockManager
from alignedserve.instance.owners import RecentTokens, in_turn
from alignedserve.instance.prefix_dedup import PrefixDedup
from alignedserve.prefill_worker.prompt_table import PromptTable
from alignedserve.prefill_worker.scheduled_request import PromptState, ScheduledRequest
from alignedserve.prefill_worker.stages import Stages
from alignedserve.protocol.messages import InstanceLimits, Work
from alignedserve.scheduling.boundary import PrefillRequest
from alignedserve.types import RequestKey

# What counts together for turns.
_OWNER = attrgetter("owner", "is_rt")


@dataclass
class PrefillPlan:
    """The actions of a prefill instance at an iteration boundary, as decided by its schedule."""

    # Prompts to preempt: their computed KV is saved, and their blocks become free. `preempted` follows when no copy is
    # running. This is carried out first.
    preempted: list[RequestKey] = field(default_factory=list)
    # Prompts that start. They have all their blocks.
    new_prompts: list[Work] = field(default_factory=list)
    # New prompts with KV to copy from the pool, beyond what they share here. `loaded` follows, or `abort` and then
    # `saved` if the copy failed.
    loads: list[Work] = field(default_factory=list)
    # Candidates with KV to copy from the pool. `staged` follows, or `unstage` and then `staged` if the copy failed.
    stages: list[Work] = field(default_factory=list)
    # Prompts to compute and the number of their tokens, the most urgent first. `computed` follows.
    chunks: list[tuple[RequestKey, int]] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether the next plan can be made immediately, without waiting for a wake."""
        return bool(self.chunks or self.preempted)


class Boundary:
    """See `scheduling.boundary.PrefillBoundary` for the contract of each method."""

    def __init__(
        self,
        limits: InstanceLimits,
        memory: BlockManager,
        prompts: PromptTable,
        stages: Stages,
        dedup: PrefixDedup,
    ) -> None:
        self.limits = limits
        self._memory = memory
        self._prompts = prompts
        self._stages = stages
        self._dedup = dedup
        # By owner and class.
        self._recent = RecentTokens()
        self.begin(-math.inf, [], 0)

    def begin(self, now: float, stages: Sequence[Work], num_tokens: int) -> None:
        """Begins the next boundary, with a plan that stages these candidates and computes at most `num_tokens`."""
        self.now = now
        self._recent.next_iteration()
        self.plan = PrefillPlan(stages=[*stages])
        self.num_tokens_left = num_tokens
        self._planned: set[RequestKey] = set()
        # Per chunk: the tokens computed before, and the tokens to compute. For the cost model.
        self.computed: list[tuple[int, int]] = []

    # ---- the requests here -------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> Sequence[ScheduledRequest]:
        return [*self._prompts.waiting.values()]

    def is_waiting(self, request: PrefillRequest) -> bool:
        return request.key in self._prompts.waiting

    def in_turn(self, requests: Sequence[PrefillRequest]) -> Sequence[PrefillRequest]:
        own = {request.key: request for request in map(_own, requests)}
        if len({request.owner for request in own.values()}) <= 1:
            return requests
        had = Counter[Hashable](self._recent.of)
        for each in self._prompts.started.values():
            if each.has_slot and each.key not in own:
                had[_OWNER(each)] += each.num_pending
        return in_turn(own.values(), _OWNER, had, attrgetter("num_pending"))

    @property
    def started(self) -> Sequence[ScheduledRequest]:
        return [*self._prompts.started.values()]

    @property
    def computing(self) -> Sequence[ScheduledRequest]:
        return self._prompts.in_state(PromptState.COMPUTING)

    @property
    def short_of_blocks(self) -> ScheduledRequest | None:
        return self._stages.short_of_blocks()

    @property
    def is_be_started(self) -> bool:
        return self._prompts.is_be_started

    @property
    def rt_behind_copies(self) -> list[ScheduledRequest]:
        return self._prompts.rt_behind_copies

    def should_wait(self, request: PrefillRequest) -> bool:
        return self._dedup.should_wait(_own(request))

    # ---- what is free ------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self._memory.num_free

    @property
    def num_blocks_to_come(self) -> int:
        return sum(each.num_blocks for each in self._prompts.in_state(PromptState.PREEMPTING))

    @property
    def num_free_slots(self) -> int:
        return self._prompts.num_free_slots

    def blocks_for(self, request: PrefillRequest) -> int:
        scheduled = _own(request)
        num_cached = scheduled.work.num_cached
        num_tokens = scheduled.num_tokens if self.is_waiting(scheduled) else num_cached
        return self._prompts.needed(num_tokens, num_cached)

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def admit(self, request: PrefillRequest) -> None:
        scheduled = _own(request)
        needed = self.blocks_for(scheduled)
        if needed > self.num_free_blocks or self.num_free_slots <= 0:
            raise RuntimeError(
                f"request {scheduled.key}: started with {needed} blocks and a slot, "
                f"but {self.num_free_blocks} blocks and {self.num_free_slots} slots are free"
            )
        self._prompts.start(scheduled)
        self._dedup.started(scheduled)
        self.plan.new_prompts.append(scheduled.work)
        if scheduled.state is PromptState.LOADING:
            self.plan.loads.append(scheduled.work)

    def preempt(self, request: PrefillRequest) -> None:
        scheduled = _own(request)
        self._prompts.preempt(scheduled)
        self.plan.preempted.append(scheduled.key)

    def chunk(self, request: PrefillRequest, num_tokens: int) -> None:
        scheduled = _own(request)
        if scheduled.state is not PromptState.COMPUTING:
            raise RuntimeError(f"request {scheduled.key}: is {scheduled.state.name}, and not being computed")
        most = min(scheduled.num_pending, self.num_tokens_left)
        if not 0 < num_tokens <= most or scheduled.key in self._planned:
            is_planned = " once more" if scheduled.key in self._planned else ""
            raise RuntimeError(
                f"request {scheduled.key}: to compute {num_tokens} tokens{is_planned}, but at most {most}"
            )
        self.num_tokens_left -= num_tokens
        self._recent.add(_OWNER(scheduled), num_tokens)
        self._planned.add(scheduled.key)
        self.plan.chunks.append((scheduled.key, num_tokens))
        self.computed.append((scheduled.num_computed, num_tokens))


def _own(request: PrefillRequest) -> ScheduledRequest:
    if not isinstance(request, ScheduledRequest):
        raise TypeError(f"{request!r}: is none of this instance's requests")
    return request
