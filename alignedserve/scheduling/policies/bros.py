"""BROS: real time (RT) by the time until its next token is due, and best effort (BE) in the time that this leaves.

The paper's rules, with its sections:

- An iteration may take as long as its most urgent RT request has left, among those that can still be in time (4.1, 6).
  Its duration is that of computing or of loading KV, whichever is longer, because they overlap.
- *Priority packing* (4.2, algorithm 1): RT in order of residual time, until the batch has its size or the iteration its
  time; then BE, the requests with the fewest saved slots first. If there is no place for BE, it replaces the RT request
  with the most residual time, provided that the iteration is then in time.
- The batch size adapts (4.2). It doubles after each iteration with time for all its RT, and otherwise falls back at
  once to its initial value.
- With `share_blocks`, on colocated instances: RT without a free block fills a block of BE from the other end, blocks
  with the most empty slots first. Only what it overwrites there is saved, and restored before that BE continues (5.1,
  5.2, `decode_worker/shared_ends.py`). BE without a block sits out as long as RT is here.
- A request that begins needs its blocks above vLLM's watermark (`decoding.num_free`). The paper compares with vLLM, and
  only says that there must be blocks.
- If RT finds neither free blocks nor blocks of BE, it makes BE leave; if there is no BE, the RT with the most residual
  time (5.2).

Departures from the paper, with reasons:

- The first request is in the batch even if loading its KV takes too long. Otherwise nothing would happen.
- RT that can't be in time goes behind RT that can. If none can, all runs, and BE as far as it takes no longer.
- RT that finds no blocks keeps others from beginning, but not from continuing.
- BE replaces neither the most urgent RT, nor RT without the time for another such iteration.
- Prompts with more tokens than an iteration may have are cut, and count as several iterations.
- The first RT prompt for which there is not enough time is computed in part, as far as there is time. So is the first
  BE. If many requests decode, one of them is always nearly late, and a prompt that waited for a moment without that
  would hold up all behind it.
- BE that runs goes before BE that waits. Otherwise BE with saved slots would hold its blocks and wait as long as others
  come.
- BE does not fill the free slots in RT's blocks. It would soon be in the way of RT, which goes first.
- The time of an iteration does not include saving what is overwritten: only a few slots, which are not yet known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import ClassVar

from alignedserve.kv.layout import REVERSED, Layout
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding, routing
from alignedserve.scheduling.boundary import AnyDecode, DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Island, Room
from alignedserve.scheduling.policies.priority import PriorityPrefill, PriorityRouter
from alignedserve.scheduling.policy import DecodePart, Policy, PrefillPart, RouterPart
from alignedserve.scheduling.token_times import TokenTimes
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey

# The initial batch size, and the size after an iteration that did not have enough time.
BASE_SIZE = 128
# The weight of the last iteration in the moving average of iteration times.
WEIGHT = 0.1


class BatchInTime:
    """The requests of an iteration, and how long it would take."""

    def __init__(self, at: DecodeBoundary, estimate: Estimate | None, config: SchedulingConfig) -> None:
        self._at = at
        self._estimate = estimate
        self._config = config
        self.requests: list[DecodeRequest] = []
        # Running requests need blocks for their next tokens.
        self._num_blocks = decoding.num_free(at, config)
        # Blocks of BE that RT may share if there are too few.
        self._num_lendable = at.num_lendable_blocks
        self._num_slots = at.num_free_slots
        self._num_tokens_left = at.limits.max_num_batched_tokens
        # The computed work, as the cost model takes it, and the number of tokens with KV to load.
        self._lengths: list[int] = []
        self._chunks: list[tuple[int, int]] = []
        self._num_fetched = 0
        # The tokens to compute of prompts for which there is not enough time as a whole.
        self.most: dict[RequestKey, int] = {}

    def has_blocks(self, request: DecodeRequest) -> bool:
        """Returns whether the request runs already, or there is room for it."""
        if request.num_columns:
            return True
        num_lendable = self._num_lendable if request.is_rt and not request.num_pooled else 0
        return self._num_slots > 0 and self._needed(request) <= self._num_blocks + num_lendable

    def add(self, request: DecodeRequest) -> None:
        self.requests.append(request)
        if not request.num_columns:
            self._take_room(request, 1)
        if _is_fetched(request):
            self._num_fetched += request.num_pooled
        elif request.num_pending == 1:
            self._lengths.append(request.num_read)
            self._num_tokens_left -= 1
        else:
            count = max(min(self.num_pending(request), self._num_tokens_left), 0)
            self._chunks.append((request.num_cached, count))
            self._num_tokens_left -= count

    def num_pending(self, request: DecodeRequest) -> int:
        return self.most.get(request.key, request.num_pending)

    def add_part(self, request: DecodeRequest, bound_s: float) -> bool:
        """Adds as many blocks of a prompt as there is time for. Returns False if there is time for none."""
        if self._estimate is None or _is_fetched(request):
            return False
        before, block_size = request.num_cached, self._at.limits.block_size
        predict = self._estimate.one_more_chunk(self._chunks, self._lengths)

        def seconds(num_blocks: int) -> float:
            return predict(before, num_blocks * block_size)

        num_most = max(min(request.num_pending, self._num_tokens_left) // block_size, 0)
        num_blocks = bisect_right(range(1, num_most + 1), bound_s, key=seconds)
        if num_blocks:
            self.most[request.key] = num_blocks * block_size
            self.add(request)
        return num_blocks > 0

    def remove(self, request: DecodeRequest) -> None:
        index = self.requests.index(request)
        others, self.requests = self.requests[index + 1 :], self.requests[:index]
        # Requests after it may get more tokens now.
        for each in (request, *others):
            self._take_room(each, -1)
        self._lengths = self._lengths[: sum(map(_is_decode, self.requests))]
        num_chunks = len(self.requests) - len(self._lengths) - sum(map(_is_fetched, self.requests))
        self._chunks = self._chunks[:num_chunks]
        self._num_fetched = sum(each.num_pooled for each in self.requests if _is_fetched(each))
        used = len(self._lengths) + sum(count for _, count in self._chunks)
        self._num_tokens_left = self._at.limits.max_num_batched_tokens - used
        for each in others:
            self.add(each)

    def seconds(self) -> float:
        if self._estimate is None:
            return 0.0
        is_computing = self._chunks or self._lengths
        computing_s = self._estimate.iteration(self._chunks, self._lengths) if is_computing else 0.0
        return max(computing_s, self._estimate.fetch(self._num_fetched) if self._num_fetched else 0.0)

    def _needed(self, request: DecodeRequest) -> int:
        return decoding.needed(self._at, request, self._config)

    def _take_room(self, request: DecodeRequest, sign: int) -> None:
        if not request.num_columns:
            self._num_blocks -= sign * self._needed(request)
            self._num_slots -= sign


def _is_fetched(request: DecodeRequest) -> bool:
    return not request.num_columns and request.num_pooled > 0


def _is_decode(request: DecodeRequest) -> bool:
    return not _is_fetched(request) and request.num_pending == 1


class BrosDecode(DecodePart):
    """On a colocated instance, candidates are prompts as well."""

    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None) -> None:
        super().__init__(limits, config)
        self._estimate = estimate
        self._times = TokenTimes()
        self._size = min(BASE_SIZE, limits.max_num_seqs)
        self._average_s = 0.0

    def took(self, seconds: float) -> None:
        self._average_s += WEIGHT * (seconds - self._average_s) if self._average_s else seconds

    def in_order(self, requests: Sequence[AnyDecode], now: float) -> Sequence[AnyDecode]:
        return decoding.real_time_first(requests)

    def is_ahead(self, begun: DecodeRequest, request: DecodeRequest, now: float) -> bool:
        return begun.is_rt or not request.is_rt

    def plan(self, at: DecodeBoundary) -> None:
        waiting = [each for each in (*at.requests, *at.batch) if not decoding.should_wait(at, each)]
        self._times.look([*at.running, *waiting], at.now)
        rt = [each for each in (*at.running, *waiting) if each.is_rt]
        rt.sort(key=lambda request: self._place(request, at.now))
        be = [each for each in (*at.running, *waiting) if not each.is_rt]
        be.sort(
            key=lambda each: (
                not each.num_columns,
                at.num_away(each) if each.num_columns else each.is_returning and each.num_pooled,
            )
        )
        gone = self.preempt(at, *self._victims(at, rt))
        rt, be = ([each for each in some if each not in gone] for some in (rt, be))
        batch = self._pack(at, rt, be)
        decodes: list[DecodeRequest] = []
        # BE that runs can't lend its blocks in the same iteration.
        for request in decoding.real_time_first(batch.requests):
            if request.num_columns and request.num_pending == 1:
                decodes.append(request)
                continue
            if decodes:
                at.run_many(decodes)
                decodes = []
            if not request.num_columns:
                if decoding.should_wait(at, request):
                    continue
                at.admit(request)
                if request.num_pooled:
                    continue
            decoding.compute(at, request, min(batch.num_pending(request), at.num_tokens_left))
        at.run_many(decodes)

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        """Returns BE first, the requests with the least KV; then RT with the most residual time."""

        def place(request: DecodeRequest) -> tuple[bool, bool, float]:
            cost = -self._residual_s(request, at.now) if request.is_rt else request.num_blocks
            return not at.was_evicted(request), request.is_rt, cost

        return sorted(requests, key=place)

    def _residual_s(self, request: DecodeRequest, now: float) -> float:
        """Returns the seconds that its next iteration may take. Later iterations before its next token are assumed to
        take the average."""
        left_s, num_pending = self._times.left_s(request, now), request.num_pending
        if num_pending == 1:
            return left_s
        num_iterations = -(-num_pending // self.limits.max_num_batched_tokens)
        return left_s - (num_iterations - 1) * self._average_s

    def _place(self, request: DecodeRequest, now: float) -> tuple[bool, float]:
        residual_s = self._residual_s(request, now)
        return self._alone_s(request) > residual_s, residual_s

    def _can_be_in_time(self, request: DecodeRequest, now: float) -> bool:
        """Returns whether it is in time if it runs alone."""
        return self._alone_s(request) <= self._residual_s(request, now)

    def _alone_s(self, request: DecodeRequest) -> float:
        if self._estimate is None:
            return 0.0
        num_pending = request.num_pending
        if num_pending == 1:
            return self._estimate.alone(request.num_tokens)
        count = min(num_pending, self.limits.max_num_batched_tokens)
        return self._estimate.iteration([(request.num_cached, count)], [])

    def _pack(
        self, at: DecodeBoundary, rt: Sequence[DecodeRequest], be: Sequence[DecodeRequest]
    ) -> BatchInTime:
        """Implements algorithm 1."""
        batch = BatchInTime(at, self._estimate, self.config)
        bound_s, is_in_time, is_room = math.inf, True, True
        ready: list[DecodeRequest] = []
        for request in rt:
            if len(ready) == self._size:
                break
            is_room &= batch.has_blocks(request)
            if not (request.num_columns or is_room):
                continue
            batch.add(request)
            if not ready and self._can_be_in_time(request, at.now):
                bound_s = self._residual_s(request, at.now)
            if ready and batch.seconds() > bound_s:
                batch.remove(request)
                is_in_time = False
                if batch.add_part(request, bound_s):
                    ready.append(request)
                break
            ready.append(request)
        if ready and math.isinf(bound_s) and not self._can_be_in_time(ready[0], at.now):
            bound_s, is_in_time = batch.seconds(), False
        self._size = self._next_size(is_in_time)
        for request in be:
            if not batch.has_blocks(request):
                break
            if not self._add(batch, request, ready, bound_s, at.now):
                if len(batch.requests) < self._size:
                    batch.add_part(request, bound_s)
                break
        return batch

    def _add(
        self,
        batch: BatchInTime,
        request: DecodeRequest,
        ready: list[DecodeRequest],
        bound_s: float,
        now: float,
    ) -> bool:
        """Adds a BE request, or replaces the RT request with the most residual time by it."""
        batch.add(request)
        if self._fits(batch, bound_s):
            return True
        if len(ready) > 1 and self._residual_s(ready[-1], now) >= 2 * bound_s:
            last = ready.pop()
            batch.remove(last)
            if self._fits(batch, bound_s):
                return True
            batch.add(last)
            ready.append(last)
        batch.remove(request)
        return False

    def _fits(self, batch: BatchInTime, bound_s: float) -> bool:
        return len(batch.requests) <= self._size and batch.seconds() <= bound_s

    def _next_size(self, is_in_time: bool) -> int:
        most = self.limits.max_num_seqs
        return min(2 * self._size if is_in_time else BASE_SIZE, most)

    def _victims(
        self, at: DecodeBoundary, rt: Sequence[DecodeRequest]
    ) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Returns the requests that leave so that others can grow, and BE that leaves for RT without room."""
        for_rt: list[DecodeRequest] = []
        if self.config.share_blocks and any(each.is_rt for each in (*at.running, *at.arriving)):
            chosen = self._victims_of_rt(at)
        else:
            chosen = decoding.victims(at, self.config.evict_ahead, self.in_eviction_order)
        num_lendable = max(0, at.num_lendable_blocks - at.growth(self.config.evict_ahead, True))
        num_blocks = at.num_free_blocks + at.num_blocks_to_come + sum(map(at.num_freed, chosen))
        num_slots = at.num_free_slots + at.num_slots_to_come + len(chosen)
        be: list[DecodeRequest] | None = None
        for request in (each for each in rt if not each.num_columns):
            if be is None:
                in_order = self.in_eviction_order([each for each in at.running if not each.is_rt], at)
                be = [each for each in in_order if each not in chosen]
            needed = decoding.needed(at, request, self.config)
            num_lent = 0 if request.num_pooled else min(needed, num_lendable)
            num_lendable -= num_lent
            num_blocks -= needed - num_lent
            num_slots -= 1
            while (num_blocks < 0 or num_slots < 0) and be:
                for_rt.append(be.pop(0))
                num_blocks += at.num_freed(for_rt[-1])
                num_slots += 1
        return chosen, for_rt

    def _victims_of_rt(self, at: DecodeBoundary) -> list[DecodeRequest]:
        """Returns the requests that leave so that RT can grow, if BE's blocks that it may share do not suffice. BE
        without a block sits out as long as RT is here."""
        num_iterations = self.config.evict_ahead
        missing = at.growth(num_iterations, True) - at.num_lendable_blocks
        missing -= at.num_free_blocks + at.num_blocks_to_come
        chosen: list[DecodeRequest] = []
        for request in self.in_eviction_order(at.running, at)[:-1] if missing > 0 else ():
            if missing <= 0:
                break
            chosen.append(request)
            missing -= at.num_freed(request) + (at.growth_of(request, num_iterations) if request.is_rt else 0)
        return chosen


class BrosRouter(PriorityRouter):
    def room(self, island: Island) -> Room:
        """Returns how much more may be started. Instances decide which real time is lost, and how much best effort fits
        beside the rest."""
        return routing.room_to_choose(island, self.config.prefill_window)


class Bros(Policy):
    name = "bros"
    layouts: ClassVar[Sequence[Layout]] = (REVERSED,)
    summary = (
        "real time by residual time; best effort in the time left, or in place of real time that can wait"
    )

    def router(self) -> RouterPart:
        return BrosRouter(self.config)

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        return PriorityPrefill(limits, self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return BrosDecode(limits, self.config, estimate)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return BrosDecode(limits, self.config, estimate)
