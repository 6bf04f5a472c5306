"""Apt-Serve: each iteration has those requests that have waited long and need little memory.

The rules of the paper, with its sections:

- What scheduling a request is worth is its *pending time* (4.2): since its last token, or since it came.
- Who has missed its objective is worth next to nothing (4.2): others, which would miss theirs behind it, go first.
- An iteration has prompts, or decodes (5): of whichever have more pending time together.
- Of these it takes those worth most for each block (5), in that order, as long as there are blocks; or the one that is
  worth most, if that is more than all of those: so it has at least half of what could be had.
- Whoever decodes, and finds no block for its next token, leaves: those worth least for each block.
- Admission leaves free what vLLM's does, on which the system is built (6.1, `decoding.num_free`).
- With `hidden_cache`, a prompt may have the inputs of layers kept in place of KV (4.2): in half the memory, and worth
  less by the time that restoring its KV takes, once for each request that waits or runs, since all wait for it.
- The first half of its memory, and the second, which makes KV of inputs, are chosen like requests of their own, by what
  they gain for memory (5). Where the whole gains more for its memory than the first half does, there are no halves.
- `apt-s` (Apt-Serve-S, 6.7) has no kinds of iterations: as under Sarathi-Serve, prompts have the tokens for which there
  is time beside all decodes, in chunks. Who begins, who leaves and who has inputs is chosen in the same way.
- In an iteration of decodes, whoever has inputs runs if that is worth more than it costs (5); until then it waits with
  its blocks. Who would not begin with inputs any more is computed again with KV, when there is room for that (5).

Where this departs from the paper, and why:

- Who left with KV has it in the pool and fetches it, beside an iteration of any kind, instead of computing it again. So
  it comes back with KV. Nobody who runs with KV is computed again for the sake of having inputs.
- Who is late has KV: what is worth next to nothing is worth nobody's time.
- A prompt with more tokens than an iteration may have is cut, and its next chunk is in the next iteration of prompts.
- `apt-s` has the budget of `sarathi`, by the tightest objective that runs, where the paper's is fixed; what restoring
  takes is taken from it. Prompts that have begun restore their inputs before decodes do, which else might leave them no
  room in any iteration.
- What a request has waited at the router counts only where its objective tells.
- It chooses among a bounded number of prompts, which is far more than an instance runs at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding, routing
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.chunk_budget import tokens_beside
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Island, RoutedRequest
from alignedserve.scheduling.marginal_gains import Piece, choose
from alignedserve.scheduling.policies.base import DecodePart, Policy, RouterPart
from alignedserve.scheduling.token_times import TokenTimes
from alignedserve.timing.estimate import Estimate

# What is worth next to nothing, in seconds.
LITTLE_S = 1e-6


class AptDecode(DecodePart):
    """Candidates are prompts as well, on a colocated instance."""

    def __init__(
        self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None = None
    ) -> None:
        """`estimate` says what inputs cost that are kept; without it none are."""
        super().__init__(limits, config)
        self._times = TokenTimes()
        self._estimate = estimate if limits.can_keep_inputs else None
        # Of the plan that is made.
        self._loss_s = 0.0

    def plan(self, at: DecodeBoundary) -> None:
        waiting = self._look(at)
        ready, begun = at.ready_and_behind()
        self._admit(at, [each for each in waiting if each.num_pooled])
        prompts = [each for each in waiting if not each.num_pooled]
        if self._pending_s([*begun, *prompts], at.now) > self._pending_s(ready, at.now):
            for request in begun:
                decoding.compute(at, request, at.num_tokens_left)
            if self._admit(at, prompts) or begun:
                return
        at.run_each(self._in_order(self._worth_running(ready, at.now), at))
        if not ready:
            # Nobody has waited, since all have just come.
            for request in begun:
                decoding.compute(at, request, at.num_tokens_left)
            self._admit(at, prompts)

    def _look(self, at: DecodeBoundary) -> list[DecodeRequest]:
        """Has some leave, and returns those that wait."""
        waiting = [each for each in (*at.requests, *at.batch) if not decoding.had_better_wait(at, each)]
        self._times.look([*at.running, *waiting], at.now)
        self._make_room(at)
        self._loss_s = self._loss_of_a_token_s(at)
        at.drop(self._switching(at))
        return waiting

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

    # ---- which leave -------------------------------------------------------------------------------------------------

    def _make_room(self, at: DecodeBoundary) -> None:
        """Inputs are dropped only when there is no block for the next iteration, since their blocks are free at
        once."""
        leaving = decoding.victims(at, self.config.evict_ahead, self.in_eviction_order)
        self.preempt(at, [request for request in leaving if not request.keeps_inputs])
        if any(request.keeps_inputs for request in leaving):
            missing = decoding.victims(at, 1, self.in_eviction_order)
            at.drop([request for request in missing if request.keeps_inputs])

    def _switching(self, at: DecodeBoundary) -> list[DecodeRequest]:
        """Those with inputs that would not begin with them now, if there is room for their KV."""
        num_free = decoding.num_free(at, self.config)
        found = []
        for request in self._in_order((each for each in at.running if each.keeps_inputs), at):
            num_more = self._num_blocks(request, at, decoding.num_ahead(self.config)) - request.num_blocks
            if request.num_pending == 1 and num_more <= num_free and not self._pays(request, at.now):
                found.append(request)
                num_free -= num_more
        return found

    # ---- what keeping inputs costs -----------------------------------------------------------------------------------

    def _loss_of_a_token_s(self, at: DecodeBoundary) -> float:
        """How much longer all wait together in an iteration for each token that is kept as inputs."""
        if self._estimate is None:
            return 0.0
        num_requests = len(at.requests) + len(at.batch) + len(at.running)
        return num_requests * self._estimate.restored_token_s

    def _gain_s(self, request: DecodeRequest, now: float) -> float:
        """What an iteration with its inputs is worth."""
        return self.worth_s(request, now) - self._loss_s * request.num_tokens

    def _pays(self, request: DecodeRequest, now: float) -> bool:
        """Whether half of the memory gains more, with its inputs, than half of what all of it gains with its KV."""
        return 2 * self._gain_s(request, now) > self.worth_s(request, now)

    def _worth_running(self, ready: list[DecodeRequest], now: float) -> list[DecodeRequest]:
        """Those whose running gains more than it costs the others; all, if there are no others."""
        found = [each for each in ready if not each.keeps_inputs or self._gain_s(each, now) > 0]
        return found or ready

    # ---- which begin -------------------------------------------------------------------------------------------------

    def _pieces(self, request: DecodeRequest, at: DecodeBoundary) -> list[Piece]:
        """All memory that its KV takes, or one half after the other."""
        worth_s, memory = self.worth_s(request, at.now), self._num_blocks(request, at)
        needed = decoding.needed(at, request, self.config)
        whole = [Piece(request, False, worth_s, memory, needed)]
        if self._estimate is None or request.num_pooled:
            return whole
        gain_s = worth_s - self._loss_s * request.num_tokens
        if 2 * gain_s <= worth_s:
            return whole
        half = decoding.needed(at, request, self.config, keeps_inputs=True)
        if half == needed:
            return whole
        return [
            Piece(request, True, gain_s, memory / 2, half),
            Piece(request, False, worth_s - gain_s, memory / 2, needed - half, is_second=True),
        ]

    def _num_blocks(self, request: DecodeRequest, at: DecodeBoundary, num_more: int = 1) -> int:
        """The number of blocks that its KV takes with so many more tokens."""
        return at.limits.span.num_held(request.num_cached, request.num_tokens + num_more)

    def _in_order(self, requests: Iterable[DecodeRequest], at: DecodeBoundary) -> list[DecodeRequest]:
        """Those worth most for each block first."""

        now, num_held = at.now, at.limits.span.num_held

        def density(request: DecodeRequest) -> float:
            return self.worth_s(request, now) / num_held(request.num_cached, request.num_tokens + 1)

        return sorted(requests, key=density, reverse=True)

    def _admit(
        self, at: DecodeBoundary, candidates: Iterable[DecodeRequest], num_tokens: int | None = None
    ) -> bool:
        """Returns whether anybody began. `num_tokens` bounds what is computed of their prompts."""
        has_begun, num_left = False, at.num_tokens_left if num_tokens is None else num_tokens
        if num_left <= 0:
            candidates = [each for each in candidates if each.num_pooled]
        num_free = decoding.num_free(at, self.config)
        pieces = (piece for request in candidates for piece in self._pieces(request, at))
        for choice in choose(pieces, num_free, at.num_free_slots):
            request = choice.request
            if not request.num_pooled and num_left <= 0:
                break
            if decoding.had_better_wait(at, request):
                continue
            at.admit(request, choice.keeps_inputs)
            has_begun = True
            if not request.num_pooled:
                num_left -= decoding.compute(at, request, num_left)
        return has_begun

    def _pending_s(self, requests: Iterable[DecodeRequest], now: float) -> float:
        return sum(now - float(request.mark.since_s) for request in requests)


class AptSDecode(AptDecode):
    """Apt-Serve-S."""

    def __init__(
        self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None = None
    ) -> None:
        super().__init__(limits, config, estimate)
        self._time = estimate

    def plan(self, at: DecodeBoundary) -> None:
        waiting = self._look(at)
        ready, begun = at.ready_and_behind()
        self._admit(at, [each for each in waiting if each.num_pooled])
        decodes = self._in_order(self._worth_running(ready, at.now), at)
        with_inputs = [each for each in decodes if each.keeps_inputs]
        at.run_each([each for each in decodes if not each.keeps_inputs])
        restoring_s = self._restoring_s([*with_inputs, *begun])
        num_left = tokens_beside(at, self._time, [each.num_tokens for each in decodes], restoring_s)
        num_left = min(num_left, at.num_tokens_left - len(with_inputs))
        for request in self._in_order(begun, at):
            num_left -= decoding.compute(at, request, num_left)
        at.run_each(with_inputs)
        self._admit(at, [each for each in waiting if not each.num_pooled], num_left)

    def _restoring_s(self, requests: Iterable[DecodeRequest]) -> float:
        """How long it takes to restore the KV of those of which inputs are kept."""
        num_tokens = sum(each.num_cached for each in requests if each.keeps_inputs)
        return num_tokens * self._time.restored_token_s if self._time else 0.0


class AptRouter(RouterPart):
    def start(self, island: Island) -> Iterator[RoutedRequest]:
        """New ones do not wait for those that were evicted: instances know who goes first."""
        room = routing.room_to_choose(island, self.config.prefill_window)
        yield from routing.start_line(island, 0, room)


class Apt(Policy):
    name = "apt"
    summary = "who has waited longest for the memory it needs; who is late goes last"
    keeps_inputs = True

    def router(self) -> RouterPart:
        return AptRouter(self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptDecode(limits, self.config)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptDecode(limits, self.config, estimate)


class AptS(Apt):
    name = "apt-s"
    summary = "as apt, with prompts in chunks beside decodes"

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptSDecode(limits, self.config, estimate)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptSDecode(limits, self.config, estimate)
