"""Apt-Serve: each iteration has those requests that have waited long and need little memory.

The rules of the paper, with its sections:

- What scheduling a request is worth is its *pending time* (4.2): since its last token, or since it came.
- Who has missed its objective is worth next to nothing (4.2): others, which would miss theirs behind it, go first.
- An iteration has prompts, or decodes (5): of whichever have more pending time together.
- Of these it takes those worth most for each block (5), in that order, as long as there are blocks; or the one that is
  worth most, if that is more than all of those: so it has at least half of what could be had.
- Whoever decodes, and finds no block for its next token, leaves: those worth least for each block.

Where this departs from the paper, and why:

- All keep KV. That some keep layers' inputs instead, in half the memory, is a format, and is not there yet.
- Who left has its KV in the pool and fetches it, beside an iteration of any kind, instead of computing it again.
- A prompt with more tokens than an iteration may have is cut, and its next chunk is in the next iteration of prompts.
- What a request has waited at the router counts only where its objective tells.
- It chooses among a bounded number of prompts, which is far more than an instance runs at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding, routing
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Island, RoutedRequest
from alignedserve.scheduling.policies.base import DecodePart, Policy, RouterPart
from alignedserve.scheduling.token_times import TokenTimes
from alignedserve.timing.estimate import Estimate

# What is worth next to nothing, in seconds.
LITTLE_S = 1e-6


class AptDecode(DecodePart):
    """Candidates are prompts as well, on a colocated instance."""

    def __init__(self, limits: InstanceLimits, config: SchedulingConfig) -> None:
        super().__init__(limits, config)
        self._times = TokenTimes()

    def plan(self, at: DecodeBoundary) -> None:
        waiting = [each for each in (*at.requests, *at.batch) if not decoding.had_better_wait(at, each)]
        self._times.look([*at.running, *waiting], at.now)
        self.preempt(at, decoding.victims(at, self.config.evict_ahead, self.in_eviction_order))
        ready, begun = at.ready_and_behind()
        self._admit(at, [each for each in waiting if each.num_pooled])
        prompts = [each for each in waiting if not each.num_pooled]
        if self._pending_s([*begun, *prompts], at.now) > self._pending_s(ready, at.now):
            for request in begun:
                decoding.compute(at, request, at.num_tokens_left)
            if self._admit(at, prompts) or begun:
                return
        at.run_each(self._in_order(ready, at))
        if not ready:
            # Nobody has waited, since all have just come.
            for request in begun:
                decoding.compute(at, request, at.num_tokens_left)
            self._admit(at, prompts)

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        """Those worth least for each block first; those whose eviction was wanted at the last boundary stay in
        front."""
        self._times.look(requests, at.now)
        in_order = self._in_order(requests, at)
        in_order.reverse()
        return sorted(in_order, key=lambda request: not at.was_evicted(request))

    def worth_s(self, request: DecodeRequest, now: float) -> float:
        is_late = request.is_rt and self._times.left_s(request, now) < 0
        return LITTLE_S if is_late else max(now - request.mark.since_s, LITTLE_S)

    def choose(self, requests: Iterable[DecodeRequest], at: DecodeBoundary) -> list[DecodeRequest]:
        """Which of these requests begin, in the blocks and slots that are free."""
        num_blocks, num_slots = at.num_free_blocks - at.growth(self.config.admit_ahead), at.num_free_slots
        chosen, best = [], None
        for request in self._in_order(requests, at):
            needed = at.growth_of(request, self.config.admit_ahead)
            if needed > at.num_free_blocks - at.growth(self.config.admit_ahead):
                continue
            if best is None or self.worth_s(request, at.now) > self.worth_s(best, at.now):
                best = request
            if needed <= num_blocks and num_slots > 0:
                chosen.append(request)
                num_blocks -= needed
                num_slots -= 1
        is_more = best is not None and self.worth_s(best, at.now) > sum(
            self.worth_s(request, at.now) for request in chosen
        )
        return [best] if best is not None and is_more and at.num_free_slots > 0 else chosen

    def _in_order(self, requests: Iterable[DecodeRequest], at: DecodeBoundary) -> list[DecodeRequest]:
        """Those worth most for each block first."""
        block_size = at.limits.block_size

        def density(request: DecodeRequest) -> float:
            return self.worth_s(request, at.now) / math.ceil((request.num_tokens + 1) / block_size)

        return sorted(requests, key=density, reverse=True)

    def _admit(self, at: DecodeBoundary, candidates: Iterable[DecodeRequest]) -> bool:
        """Returns whether anybody began."""
        has_begun = False
        for request in self.choose(candidates, at):
            if not request.num_pooled and at.num_tokens_left <= 0:
                break
            if decoding.had_better_wait(at, request):
                continue
            at.admit(request)
            has_begun = True
            if not request.num_pooled:
                decoding.compute(at, request, at.num_tokens_left)
        return has_begun

    def _pending_s(self, requests: Iterable[DecodeRequest], now: float) -> float:
        return sum(now - float(request.mark.since_s) for request in requests)


class AptRouter(RouterPart):
    def start(self, island: Island) -> Iterator[RoutedRequest]:
        """New ones do not wait for those that were evicted: instances know who goes first."""
        room = routing.room_to_choose(island, self.config.prefill_window)
        yield from routing.start_line(island, 0, room)


class Apt(Policy):
    name = "apt"
    summary = "who has waited longest for the memory it needs; who is late goes last"

    def router(self) -> RouterPart:
        return AptRouter(self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptDecode(limits, self.config)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptDecode(limits, self.config)
