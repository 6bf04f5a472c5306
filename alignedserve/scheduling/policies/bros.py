"""BROS: real time (RT) by what is left until its next token is due, and as much best effort (BE) as that leaves time
for.

The rules of the paper, with its sections:

- An iteration may take as long as the most urgent RT request has left, of those that can still be in time (4.1, 6). Its
  time is that of computing or that of fetching KV, whichever is longer, since they overlap.
- *Priority packing* (4.2, algorithm 1): RT in order of residual time, until the batch has its size, or the iteration
  its time; then BE, those with the fewest saved slots first. Where there is no place for BE, it replaces the RT request
  with the most residual time, if the iteration is in time then.
- The size of a batch adapts (4.2): it doubles with each iteration that had time for all its RT, and falls back at once
  to where it began after one that had not.
- With `share_blocks`, on colocated instances: RT that finds no free block fills a block of BE from the other end, those
  with the most empty slots first; only what it overwrites there is saved, and comes back before that BE goes on (5.1,
  5.2, `decode_worker/shared_ends.py`). BE that finds no block sits out as long as RT is here.
- Who begins finds its blocks above vLLM's watermark (`decoding.num_free`): the paper compares with vLLM, and says only
  that there must be blocks.
- RT that finds no blocks, its own or BE's, makes BE leave; where there is none, RT with the most residual time (5.2).

Where this departs from the paper, and why:

- The first is in the batch, even if fetching its KV takes too long for it: else nothing would happen.
- RT that can't be in time goes behind RT that can. Where none can, all runs, and BE as far as that takes no longer.
- RT that finds no blocks keeps others from beginning, not from going on.
- BE replaces neither the most urgent, nor RT that would not have the time for another such iteration.
- Prompts that have more tokens than an iteration may are cut, and count as so many iterations.
- The first RT that there is no time for, if it is a prompt, is computed in part, as far as there is time, and so is the
  first BE. Somebody is always at the brink where many decode, and a prompt that waited until nobody is would keep all
  behind it waiting as well.
- BE that is here goes before BE that is not: else one of which slots were saved would hold its blocks and wait, as long
  as others come.
- BE does not fill what RT leaves free in its blocks: it would soon be in RT's way, and RT goes first.
- The time that an iteration may take has no part for saving what is overwritten: a few slots, before they are known.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding, routing
from alignedserve.scheduling.boundary import AnyDecode, DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Island, Room
from alignedserve.scheduling.policies.base import DecodePart, Policy, PrefillPart, RouterPart
from alignedserve.scheduling.policies.priority import PriorityPrefill, PriorityRouter
from alignedserve.scheduling.token_times import TokenTimes
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey

# The size of a batch to begin with, and after one that did not have the time.
BASE_SIZE = 128
# The weight of the last iteration in the moving average of how long they take.
WEIGHT = 0.1


class Batch:
    """What an iteration would have, and how long it would take."""

    def __init__(self, at: DecodeBoundary, estimate: Estimate | None, config: SchedulingConfig) -> None:
        self._at = at
        self._estimate = estimate
        self._config = config
        self.requests: list[DecodeRequest] = []
        # Those that run need blocks for their next tokens.
        self._num_blocks = decoding.num_free(at, config)
        # RT may share these of BE when there are too few.
        self._num_lendable = at.num_lendable_blocks
        self._num_slots = at.num_free_slots
        self._num_tokens_left = at.limits.max_num_batched_tokens
        # What is computed, as for the cost model, and the number of tokens whose KV is fetched.
        self._lengths: list[int] = []
        self._chunks: list[tuple[int, int]] = []
        self._num_fetched = 0
        # The most tokens that prompts compute for which there is no time as a whole.
        self.most: dict[RequestKey, int] = {}

    def has_blocks(self, request: DecodeRequest) -> bool:
        """Whether it runs already, or there is room for it."""
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
            self._lengths.append(request.num_tokens)
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
        # What came after it may have more tokens now.
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
    """Candidates are prompts as well, on a colocated instance."""

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
        waiting = [each for each in (*at.requests, *at.batch) if not decoding.had_better_wait(at, each)]
        self._times.look([*at.running, *waiting], at.now)
        rt = [each for each in (*at.running, *waiting) if each.is_rt]
        rt.sort(key=lambda request: self._place(request, at.now))
        be = [each for each in (*at.running, *waiting) if not each.is_rt]
        be.sort(
            key=lambda each: (
                not each.num_columns,
                at.num_away(each) if each.num_columns else each.num_pooled,
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
                at.run_each(decodes)
                decodes = []
            if not request.num_columns:
                if decoding.had_better_wait(at, request):
                    continue
                at.admit(request)
                if request.num_pooled:
                    continue
            decoding.compute(at, request, min(batch.num_pending(request), at.num_tokens_left))
        at.run_each(decodes)

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        """BE first, those with the least KV; then RT with the most residual time."""

        def place(request: DecodeRequest) -> tuple[bool, bool, float]:
            cost = -self._residual_s(request, at.now) if request.is_rt else request.num_blocks
            return not at.was_evicted(request), request.is_rt, cost

        return sorted(requests, key=place)

    def _residual_s(self, request: DecodeRequest, now: float) -> float:
        """The seconds that its next iteration may take: those after it, until the next token, take their average."""
        left_s, num_pending = self._times.left_s(request, now), request.num_pending
        if num_pending == 1:
            return left_s
        num_iterations = -(-num_pending // self.limits.max_num_batched_tokens)
        return left_s - (num_iterations - 1) * self._average_s

    def _place(self, request: DecodeRequest, now: float) -> tuple[bool, float]:
        residual_s = self._residual_s(request, now)
        return self._alone_s(request) > residual_s, residual_s

    def _can_be_in_time(self, request: DecodeRequest, now: float) -> bool:
        """If it runs alone."""
        return self._alone_s(request) <= self._residual_s(request, now)

    def _alone_s(self, request: DecodeRequest) -> float:
        if self._estimate is None:
            return 0.0
        num_pending = request.num_pending
        if num_pending == 1:
            return self._estimate.alone(request.num_tokens)
        count = min(num_pending, self.limits.max_num_batched_tokens)
        return self._estimate.iteration([(request.num_cached, count)], [])

    def _pack(self, at: DecodeBoundary, rt: Sequence[DecodeRequest], be: Sequence[DecodeRequest]) -> Batch:
        """Algorithm 1."""
        batch = Batch(at, self._estimate, self.config)
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
        self, batch: Batch, request: DecodeRequest, ready: list[DecodeRequest], bound_s: float, now: float
    ) -> bool:
        """Adds a BE request, or has it replace the RT request with the most residual time."""
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

    def _fits(self, batch: Batch, bound_s: float) -> bool:
        return len(batch.requests) <= self._size and batch.seconds() <= bound_s

    def _next_size(self, is_in_time: bool) -> int:
        most = self.limits.max_num_seqs
        return min(2 * self._size if is_in_time else BASE_SIZE, most)

    def _victims(
        self, at: DecodeBoundary, rt: Sequence[DecodeRequest]
    ) -> tuple[list[DecodeRequest], list[DecodeRequest]]:
        """Who leaves so that the others can grow, and BE for RT that finds no room."""
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
        """Who leaves so that RT can grow, where BE's blocks that it may share do not suffice. BE that finds no block
        sits out as long as RT is here."""
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
        """Instances know which real time is lost, and how much best effort fits beside the rest."""
        return routing.room_to_choose(island, self.config.prefill_window)


class Bros(Policy):
    name = "bros"
    can_share_blocks = True
    summary = (
        "real time by residual time, best effort as far as that leaves time, or in place of who can wait"
    )

    def router(self) -> RouterPart:
        return BrosRouter(self.config)

    def prefill(self, limits: InstanceLimits, estimate: Estimate | None) -> PrefillPart:
        return PriorityPrefill(limits, self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return BrosDecode(limits, self.config, estimate)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return BrosDecode(limits, self.config, estimate)
