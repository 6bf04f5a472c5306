"""A decode instance between two iterations, as its policy sees it, and the plan that the policy's calls build.

Only what fits is planned. A call that does not fit returns False, or raises an error with both numbers if the policy is
wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import cast

from alignedserve.decode_worker.arrivals import Arrivals
from alignedserve.decode_worker.block_table import BlockTable
from alignedserve.decode_worker.candidates import Candidates
from alignedserve.decode_worker.plan import DecodePlan
from alignedserve.decode_worker.scheduled_request import ScheduledRequest
from alignedserve.instance.prefix_cache import PrefixCache
from alignedserve.instance.prefix_dedup import PrefixDedup
from alignedserve.kv.layout import PLAIN, Layout
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import AnyDecode, DecodeRequest
from alignedserve.timing.cost import IterationLoad
from alignedserve.types import RequestKey


class Boundary:
    """See `scheduling.boundary.DecodeBoundary` for the contract of each method."""

    def __init__(
        self,
        limits: InstanceLimits,
        candidates: Candidates,
        block_table: BlockTable,
        prefix_cache: PrefixCache,
        dedup: PrefixDedup,
        arrivals: Arrivals,
    ) -> None:
        self.limits = limits
        self._candidates = candidates
        self._block_table = block_table
        self._prefix_cache = prefix_cache
        self._dedup = dedup
        self._arrivals = arrivals
        self._begin(-math.inf, frozenset())
        self._num_planned = 0

    def begin(self, now: float) -> None:
        """Begins the next boundary with an empty plan."""
        self._begin(now, self._evicted)
        self._num_planned += 1
        self._block_table.ends.begin(self._num_planned)
        self.plan.ends = self._block_table.ends.ops

    def _begin(self, now: float, evicted: frozenset[RequestKey]) -> None:
        self.now = now
        self.plan = DecodePlan()
        # The requests to evict according to the last boundary, and to this one.
        self._were_evicted, self._evicted = evicted, frozenset[RequestKey]()
        self.num_tokens_left = self.limits.max_num_batched_tokens
        self.chunks, self.lengths, self.num_restored = list[tuple[int, int]](), list[int](), 0
        self._num_restored_blocks_left = self.limits.max_restored_blocks

    @property
    def load(self) -> IterationLoad:
        return IterationLoad(self.chunks, self.lengths, self.num_restored)

    # ---- the requests here -------------------------------------------------------------------------------------------

    @property
    def running(self) -> Sequence[ScheduledRequest]:
        return [*self._block_table.running.values()]

    def ready_and_pending(self) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        running = self._block_table.running.values()
        ready: list[DecodeRequest] = [each for each in running if each.num_tokens - each.num_cached <= 1]
        if len(ready) == len(running):
            return ready, []
        return ready, [each for each in running if each.num_tokens - each.num_cached > 1]

    @property
    def arriving(self) -> Sequence[ScheduledRequest]:
        return [*self._block_table.pulling.values()]

    @property
    def requests(self) -> Sequence[ScheduledRequest]:
        return self._candidates.in_turn(self._block_table.running.values())

    @property
    def owners_compete(self) -> bool:
        return self._candidates.owners_compete

    @property
    def batch(self) -> Sequence[ScheduledRequest]:
        return [*self._candidates.batch]

    @property
    def first_batch_to_stay(self) -> int:
        return self._candidates.first_batch_to_stay

    def was_evicted(self, request: DecodeRequest) -> bool:
        return request.key in self._were_evicted

    def should_wait(self, request: DecodeRequest) -> bool:
        own = _own(request)
        if own.num_pooled and self._arrivals.should_wait(own):
            return True
        return not own.is_returning and self._dedup.should_wait(own)

    # ---- what is free ------------------------------------------------------------------------------------------------

    @property
    def num_free_blocks(self) -> int:
        return self._block_table.num_free

    @property
    def num_lendable_blocks(self) -> int:
        return self._block_table.num_lendable

    def num_away(self, request: DecodeRequest) -> int:
        return self._block_table.ends.num_away(_own(request))

    def num_freed(self, request: DecodeRequest) -> int:
        return self._block_table.num_freed(_own(request))

    def num_freed_together(self, requests: Iterable[DecodeRequest]) -> int:
        return self._block_table.num_freed_together([*map(_own, requests)])

    @property
    def num_free_slots(self) -> int:
        return self._block_table.num_free_slots

    @property
    def num_blocks_to_come(self) -> int:
        return self._block_table.num_blocks_to_come

    @property
    def num_slots_to_come(self) -> int:
        return self._block_table.num_slots_to_come

    def growth(self, num_iterations: int, is_rt: bool | None = None) -> int:
        requests: Iterable[ScheduledRequest] = chain(
            self._block_table.running.values(), self._block_table.pulling.values()
        )
        if is_rt is not None:
            requests = (request for request in requests if request.is_rt is is_rt)
        return self._block_table.growth(requests, num_iterations)

    def growth_of(self, request: DecodeRequest, num_iterations: int, layout: Layout | None = None) -> int:
        return self._block_table.growth_of(_own(request), num_iterations, layout)

    # ---- what is to be done ------------------------------------------------------------------------------------------

    def evict(self, all_scheduled: Iterable[DecodeRequest]) -> None:
        self.plan.wants_evicted = [request.key for request in all_scheduled]
        self._evicted = frozenset(self.plan.wants_evicted)
        if not self._evicted:
            return
        if unknown := self._evicted - self._block_table.running.keys():
            raise RuntimeError(f"requests {sorted(unknown)}: to be evicted, but they do not run")
        running = self._block_table.running
        if without_kv := sorted(
            key for key in self._evicted if not running[key].layout.holds_kv or running[key].is_embedding
        ):
            raise RuntimeError(
                f"requests {without_kv}: to be evicted, but they have no KV that could go on, and can only be dropped"
            )

    def drop(self, requests: Iterable[DecodeRequest]) -> None:
        leaving = [*requests]
        if not leaving:
            return
        for request in leaving:
            scheduled = _own(request)
            if scheduled.key not in self._block_table.running or scheduled.last_run == self._num_planned:
                raise RuntimeError(
                    f"request {scheduled.key}: to be dropped, but it does not run, or is planned"
                )
            self._block_table.ended(scheduled.key)
            self._dedup.dropped(scheduled)
            # It can't be planned any more.
            scheduled.last_run = self._num_planned
            self.plan.drops.append(scheduled.key)
        self._evicted -= {*self.plan.drops}
        self.plan.wants_evicted = [key for key in self.plan.wants_evicted if key in self._evicted]

    def admit(self, request: DecodeRequest, layout: Layout = PLAIN) -> None:
        scheduled = _own(request)
        if scheduled.num_cached and self._prefix_cache.has_as_much(scheduled.work):
            scheduled.compute_instead()
        if not layout.holds_kv and (scheduled.num_cached or not self.limits.can_keep_inputs):
            raise RuntimeError(
                f"request {scheduled.key}: its inputs can't be kept; the pool has KV of {scheduled.num_cached} tokens"
            )
        needed = self._block_table.needed(scheduled, layout)
        num_lendable = 0 if scheduled.num_cached else self._block_table.num_lendable_to(scheduled)
        if needed > self.num_free_blocks + num_lendable or self.num_free_slots <= 0:
            raise RuntimeError(
                f"request {scheduled.key}: admitted with {needed} blocks and a slot, "
                f"but {self.num_free_blocks} blocks, {num_lendable} lent and {self.num_free_slots} slots are free"
            )
        self._candidates.take(scheduled)
        scheduled.layout = layout
        if not layout.holds_kv:
            # It neither uses nor provides shared KV.
            scheduled.block_hashes = ()
        if scheduled.num_cached:
            self._prefix_cache.take_arriving(scheduled.work, scheduled)
            self._arrivals.admitted(scheduled)
            self._block_table.admit(scheduled)
            self._dedup.started(scheduled)
            self.plan.pulls.append(scheduled.work)
        else:
            if layout.holds_kv:
                # Lent blocks are no shared ones. With a window it holds no more of those than it needs in any case.
                has_lent = self._block_table.ends.is_on and not self.limits.window
                max_blocks = self.num_free_blocks if has_lent else None
                scheduled.num_cached = self._prefix_cache.take(scheduled.work, scheduled, max_blocks)
            self._block_table.start(scheduled)
            self._dedup.started(scheduled)
            self.plan.new_prompts.append(scheduled.work)

    def run_many(self, requests: Sequence[AnyDecode]) -> list[AnyDecode]:
        if len(requests) > self.num_tokens_left:
            return [request for request in requests if self.run(request)]
        block_size, number, found = self.limits.block_size, self._num_planned, []
        run, lengths, own = self.plan.run, self.lengths, cast("Sequence[ScheduledRequest]", requests)
        for index, request in enumerate(own):
            num_tokens = request.num_tokens
            if (
                num_tokens - request.num_cached > 1
                or request.last_run == number
                or not request.layout.holds_kv
            ):
                if self.run(request):
                    found.append(requests[index])
            elif (not request.shares and num_tokens <= request.end * block_size) or self._grow(
                request, num_tokens
            ):
                request.last_run = number
                run.append(request.key)
                lengths.append(num_tokens - request.num_saved)
                found.append(requests[index])
        num_in_chunks = sum(count for _, count in self.chunks) if self.chunks else 0
        self.num_tokens_left = self.limits.max_num_batched_tokens - num_in_chunks - len(lengths)
        return found

    def run(self, request: DecodeRequest) -> bool:
        return self.chunk(request, request.num_pending)

    def chunk(self, request: DecodeRequest, num_tokens: int) -> bool:
        scheduled = _own(request)
        is_planned = scheduled.last_run == self._num_planned
        if not 0 < num_tokens <= scheduled.num_pending or is_planned:
            is_again = " once more" if is_planned else ""
            raise RuntimeError(
                f"request {scheduled.key}: to compute {num_tokens} tokens{is_again}, of {scheduled.num_pending} pending"
            )
        needed = scheduled.num_cached + num_tokens
        num_restored_blocks = 0 if scheduled.layout.holds_kv else -(-needed // self.limits.block_size)
        if num_tokens > self.num_tokens_left or num_restored_blocks > self._num_restored_blocks_left:
            return False
        if not self._grow(scheduled, needed):
            return False
        self._num_restored_blocks_left -= num_restored_blocks
        self.num_tokens_left -= num_tokens
        scheduled.last_run = self._num_planned
        if num_tokens < scheduled.num_pending:
            self.plan.chunks.append((scheduled.key, num_tokens))
        else:
            self.plan.run.append(scheduled.key)
        if not scheduled.layout.holds_kv:
            self.num_restored += scheduled.num_cached
        if scheduled.num_pending == 1:
            self.lengths.append(scheduled.num_read)
        else:
            self.chunks.append((scheduled.num_cached, num_tokens))
        return True

    def hold(self, seconds: float) -> None:
        self.plan.hold_s = seconds

    def _grow(self, request: ScheduledRequest, num_tokens: int) -> bool:
        """Returns False if too few blocks are free, and for requests to be evicted, which are about to free their
        blocks."""
        has_blocks = self._block_table.has_blocks(request, num_tokens)
        if not request.shares and has_blocks:
            return True
        if request.key in self._evicted:
            return has_blocks and request.is_rt and self._block_table.grow(request, num_tokens)
        return self._block_table.grow(request, num_tokens)


def _own(request: DecodeRequest) -> ScheduledRequest:
    if not isinstance(request, ScheduledRequest):
        raise TypeError(f"{request!r}: is none of this instance's requests")
    return request
