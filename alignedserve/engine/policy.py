"""What an instance runs in its next iteration. Pure: no tensors, no clock, no ids of blocks, only counts.

There is no prefill and no decode phase, only tokens whose KV is still to be computed: all of a prompt at first,
one token at a time once a request has caught up. A plan gives each request some of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import takewhile

from alignedserve.engine.request import Request
from alignedserve.prefixes import pays_to_wait


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int
    # tokens of one iteration, all requests together
    max_num_batched_tokens: int
    # tokens of one request in one iteration
    max_prefill_chunk: int
    block_size: int

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


def _nothing_found(_: Request) -> int:
    return 0


@dataclass
class Queues:
    """All unfinished requests. The engine moves them as plans say; policies only read."""

    waiting: deque[Request] = field(default_factory=deque)
    # oldest first
    running: list[Request] = field(default_factory=list)
    # KV in host memory; first to come back first
    preempted: deque[Request] = field(default_factory=deque)
    # every running request has one token pending
    is_decoding: bool = False
    # tokens of a waiting request that need not be computed, if it is admitted now: others' KV is there
    num_found: Callable[[Request], int] = _nothing_found

    def __len__(self) -> int:
        return len(self.waiting) + len(self.running) + len(self.preempted)


@dataclass
class Plan:
    """Done in this order: evict, resume, admit, then compute `work`."""

    evict: list[Request] = field(default_factory=list)
    resume: list[Request] = field(default_factory=list)
    admit: list[Request] = field(default_factory=list)
    # how many tokens of which requests
    work: list[tuple[Request, int]] = field(default_factory=list)


class IterationPolicy(ABC):
    name: str

    def __init__(self, limits: Limits) -> None:
        self.limits = limits

    @abstractmethod
    def plan(self, queues: Queues, num_free_blocks: int) -> Plan:
        """Changes nothing. Whatever it plans fits: blocks after evictions, slots, tokens."""


class FcfsPolicy(IterationPolicy):
    """First come, first served: older requests first, the youngest gives way when blocks run out."""

    name = "fcfs"

    def plan(self, queues: Queues, num_free_blocks: int) -> Plan:
        draft = _Draft(self.limits, num_free_blocks, list(queues.running))
        if not (queues.is_decoding and draft.continue_decodes()):
            draft.continue_running()
        if not draft.plan.evict:
            draft.resume(queues.preempted)
            if len(draft.plan.resume) == len(queues.preempted):
                draft.admit(queues)
        return draft.plan


class _Draft:
    """A plan in the making: what is left of blocks, tokens and slots."""

    def __init__(self, limits: Limits, num_free_blocks: int, running: list[Request]) -> None:
        self.plan = Plan()
        self._limits = limits
        self._num_free = num_free_blocks
        self._num_tokens_left = limits.max_num_batched_tokens
        self._running = running

    def continue_decodes(self) -> bool:
        """The common case of `continue_running`: one token of everybody. False, and nothing done, if that is no fit."""
        running, block_size = self._running, self._limits.block_size
        num_new_blocks = sum([request.num_computed == request.num_blocks * block_size for request in running])
        if len(running) > self._num_tokens_left or num_new_blocks > self._num_free:
            return False
        self.plan.work = [(request, 1) for request in running]
        self._take(len(running), num_new_blocks)
        return True

    def continue_running(self) -> None:
        running, limits, work = self._running, self._limits, self.plan.work
        index = 0
        while index < len(running) and self._num_tokens_left:
            request = running[index]
            count = min(request.num_pending, limits.max_prefill_chunk, self._num_tokens_left)
            num_new_blocks = max(0, limits.blocks_for(request.num_computed + count) - request.num_blocks)
            if num_new_blocks > self._num_free and not self._make_room(num_new_blocks, request):
                break
            self._take(count, num_new_blocks)
            work.append((request, count))
            index += 1

    def resume(self, queue: deque[Request]) -> None:
        """From the head of the queue while there is room for all that a request has to compute right now."""
        for request in queue:
            if not self._has_room_for(request):
                break
            self._bring_in(request, self.plan.resume, request.num_pending)

    def admit(self, queues: Queues) -> None:
        """Likewise. Who begins like one that is being computed waits, and shares that: others go before it."""
        coming: set[bytes] | None = None
        for request in queues.waiting:
            if not self._has_room_for(request):
                break
            num_found = queues.num_found(request) if request.names else 0
            if request.names:
                coming = self._coming() if coming is None else coming
                if self._had_better_wait(request, num_found, coming):
                    continue
                coming.update(request.names[num_found // self._limits.block_size :])
            self._bring_in(request, self.plan.admit, request.num_pending - num_found)

    def _has_room_for(self, request: Request) -> bool:
        has_slot = len(self._running) < self._limits.max_num_seqs
        num_blocks = self._limits.blocks_for(request.num_tokens)
        return has_slot and self._num_tokens_left > 0 and num_blocks <= self._num_free

    def _bring_in(self, request: Request, chosen: list[Request], num_pending: int) -> None:
        count = min(num_pending, self._limits.max_prefill_chunk, self._num_tokens_left)
        self._take(count, self._limits.blocks_for(request.num_tokens))
        self._running.append(request)
        chosen.append(request)
        self.plan.work.append((request, count))

    def _coming(self) -> set[bytes]:
        """Blocks that running requests are still to compute, by name."""
        block_size = self._limits.block_size
        return {
            name for request in self._running for name in request.names[request.num_computed // block_size :]
        }

    def _had_better_wait(self, request: Request, num_found: int, coming: set[bytes]) -> bool:
        block_size = self._limits.block_size
        missing = request.names[num_found // block_size :]
        num_coming = sum(1 for _ in takewhile(coming.__contains__, missing))
        return pays_to_wait(num_coming * block_size, request.num_tokens - num_found)

    def _take(self, num_tokens: int, num_blocks: int) -> None:
        self._num_tokens_left -= num_tokens
        self._num_free -= num_blocks

    def _make_room(self, num_blocks: int, request: Request) -> bool:
        """Evicts the youngest until there is room; False when `request` itself was the youngest left."""
        while num_blocks > self._num_free:
            victim = self._running.pop()
            self.plan.evict.append(victim)
            self._num_free += victim.num_blocks
            if victim is request:
                return False
        return True
