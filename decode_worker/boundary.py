"""A decode instance between two iterations, as its policy sees it, and the plan that comes of what that says.

What does not fit is not planned: the policy is refused, or is wrong, and hears so with both numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import cast

from alignedserve.decode_worker.candidates import Candidates
from alignedserve.decode_worker.holders import Holders
from alignedserve.decode_worker.members import Member
from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.instance.shares import Shares
from alignedserve.instance.twins import Twins
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import AnyDecode, DecodeRequest
from alignedserve.types import RequestKey


class Boundary:
    """See `scheduling.boundary.DecodeBoundary` for what each method promises."""

    def __init__(
        self,
        limits: InstanceLimits,
        candidates: Candidates,
        holders: Holders,
        shares: Shares,
        twins: Twins,
    ) -> None:
        self.limits = limits
        self._candidates = candidates
        self._holders = holders
        self._shares = shares
        self._twins = twins
        self._begin(-math.inf, frozenset())
        self._num_planned = 0

    def begin(self, now: float) -> None:
        """The next one."""
        self._begin(now, self._evicted)
        self._num_planned += 1

    def _begin(self, now: float, evicted: frozenset[RequestKey]) -> None:
        self.now = now
        self.plan = DecodePlan()
        # of the last boundary, and of this one
        self._were_evicted, self._evicted = evicted, frozenset[RequestKey]()
        self.num_tokens_left = self.limits.max_num_batched_tokens
        # of what the iteration computes, for the cost model
        self.chunks: list[tuple[int, int]] = []
        self.lengths: list[int] = []

    # ---- who is here -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[Member]:
        return [*self._holders.running.values()]

    def ready_and_behind(self) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        ready: list[DecodeRequest] = []
        behind: list[DecodeRequest] = []
        for member in self._holders.running.values():
            (behind if member.num_tokens - member.num_cached > 1 else ready).append(member)
        return ready, behind

    @property
    def arriving(self) -> Sequence[Member]:
        return [*self._holders.pulling.values()]

    @property
    def requests(self) -> Sequence[Member]:
        return [*self._candidates.requests]

    @property
    def batch(self) -> Sequence[Member]:
        return [*self._candidates.batch]

    def was_evicted(self, request: DecodeRequest) -> bool:
        return request.key in self._were_evicted

    def had_better_wait(self, request: DecodeRequest) -> bool:
        return self._twins.had_better_wait(_own(request))

    # ---- what is free ------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self._holders.num_free

    @property
    def num_free_slots(self) -> int:
        return self._holders.num_free_slots

    @property
    def num_blocks_to_come(self) -> int:
        return self._holders.num_blocks_to_come

    @property
    def num_slots_to_come(self) -> int:
        return self._holders.num_slots_to_come

    def growth(self, num_iterations: int, is_rt: bool | None = None) -> int:
        members: Iterable[Member] = chain(self._holders.running.values(), self._holders.pulling.values())
        if is_rt is not None:
            members = (member for member in members if member.is_rt is is_rt)
        return self._holders.growth(members, num_iterations)

    def growth_of(self, request: DecodeRequest, num_iterations: int) -> int:
        return self._holders.growth_of(_own(request), num_iterations)

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def evict(self, members: Iterable[DecodeRequest]) -> None:
        self.plan.wants_evicted = [member.key for member in members]
        self._evicted = frozenset(self.plan.wants_evicted)
        if unknown := self._evicted - self._holders.running.keys():
            raise RuntimeError(f"requests {sorted(unknown)}: to be evicted, but they do not run")

    def admit(self, request: DecodeRequest) -> None:
        member = _own(request)
        needed = -(-member.num_tokens // self.limits.block_size)
        if needed > self.num_free_blocks or self.num_free_slots <= 0:
            raise RuntimeError(
                f"request {member.key}: admitted with {needed} blocks and a slot, "
                f"but {self.num_free_blocks} blocks and {self.num_free_slots} slots are free"
            )
        self._candidates.take(member)
        if member.num_cached:
            self._holders.admit(member)
            self.plan.pulls.append(member.work)
            return
        member.num_cached = self._shares.take(member.work)
        self._holders.start(member)
        self._twins.started(member)
        self.plan.starts.append(member.work)

    def run_each(self, members: Sequence[AnyDecode]) -> list[AnyDecode]:
        if len(members) > self.num_tokens_left:
            return [member for member in members if self.run(member)]
        block_size, number, found = self.limits.block_size, self._num_planned, []
        run, lengths, own = self.plan.run, self.lengths, cast("Sequence[Member]", members)
        for index, member in enumerate(own):
            num_tokens = member.num_tokens
            if num_tokens - member.num_cached > 1 or member.last_run == number:
                if self.run(member):
                    found.append(members[index])
            elif num_tokens <= member.num_blocks * block_size or self._grow(member, num_tokens):
                member.last_run = number
                run.append(member.work.request.key)
                lengths.append(num_tokens)
                found.append(members[index])
        self.num_tokens_left = self.limits.max_num_batched_tokens - sum(count for _, count in self.chunks)
        self.num_tokens_left -= len(lengths)
        return found

    def run(self, request: DecodeRequest) -> bool:
        return self.chunk(request, request.num_pending)

    def chunk(self, request: DecodeRequest, num_tokens: int) -> bool:
        member = _own(request)
        is_planned = member.last_run == self._num_planned
        if not 0 < num_tokens <= member.num_pending or is_planned:
            is_again = " once more" if is_planned else ""
            raise RuntimeError(
                f"request {member.key}: to compute {num_tokens} tokens{is_again}, of {member.num_pending} pending"
            )
        if num_tokens > self.num_tokens_left or not self._grow(member, member.num_cached + num_tokens):
            return False
        self.num_tokens_left -= num_tokens
        member.last_run = self._num_planned
        if num_tokens < member.num_pending:
            self.plan.chunks.append((member.key, num_tokens))
        else:
            self.plan.run.append(member.key)
        if member.num_pending == 1:
            self.lengths.append(member.num_tokens)
        else:
            self.chunks.append((member.num_cached, num_tokens))
        return True

    def hold(self, seconds: float) -> None:
        self.plan.hold_s = seconds

    def _grow(self, member: Member, num_tokens: int) -> bool:
        """Victims get no blocks: they are about to give theirs back."""
        if num_tokens <= member.num_blocks * self.limits.block_size:
            return True
        return member.key not in self._evicted and self._holders.grow(member, num_tokens)


def _own(request: DecodeRequest) -> Member:
    if not isinstance(request, Member):
        raise TypeError(f"{request!r}: is none of this instance's requests")
    return request
