"""Apt-Serve: each iteration runs the requests that have waited long and need little memory.

The paper's rules, with its sections:

- The worth of scheduling a request is its *pending time* (4.2): the time since its last token, or since it came.
- A request that has missed its objective is worth next to nothing (4.2). Others, which would miss theirs behind it, go
  first.
- An iteration has either prompts or decodes (5), whichever have more pending time in total.
- From these it takes the requests worth most per block (5), in that order, as long as there are blocks. If a single one
  is worth more than all of those, it takes that one. So it gets at least half of the optimum.
- A decode that finds no block for its next token leaves: those worth least per block go first.
- Admission leaves free blocks as vLLM does, on which the paper's system is built (6.1, `decoding.num_free`).
- With `hidden_cache`, a prompt may keep the inputs of layers in place of KV (4.2). That takes half the memory. It is
  worth less by the time to restore its KV, once for each request that waits or runs, because all of them wait for it.
- The first half of a request's memory, and the second half, which turns inputs into KV, are chosen like separate
  requests, by gain per memory (5). If the whole gains more per memory than the first half, there are no halves.
- `apt-s` (Apt-Serve-S, 6.7) has no kinds of iterations. As in Sarathi-Serve, prompts get the tokens for which there is
  time beside all decodes, in chunks. Beginning, leaving and keeping inputs are decided in the same way.
- In an iteration of decodes, a request with kept inputs runs if that is worth more than it costs (5). Until then it
  waits with its blocks. A request that would no longer begin with inputs is computed again with KV, when there is room
  for that (5).

Departures from the paper, with reasons:

- A request that left with KV has it in the pool. It loads that KV, beside an iteration of any kind, instead of
  computing it again. So it comes back with KV. No request that runs with KV is computed again just to keep inputs.
- A late request keeps KV: something worth next to nothing is not worth the time of others.
- A prompt with more tokens than an iteration may have is cut. Its next chunk is in the next iteration of prompts.
- `apt-s` has the budget of `sarathi`, by the tightest objective of the running requests, while the paper's is fixed.
  The time for restoring is subtracted. Prompts that have begun restore their inputs before decodes do, because decodes
  might otherwise leave them no room in any iteration.
- The time that a request has waited at the router counts only as part of its objective.
- The instance chooses among a bounded number of prompts, far more than it runs at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from alignedserve.kv.layout import INPUTS, PLAIN
from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling import decoding, routing
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.chunk_budget import tokens_beside
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Island, RoutedRequest
from alignedserve.scheduling.marginal_gains import Piece, choose
from alignedserve.scheduling.policy import DecodePart, Policy, RouterPart
from alignedserve.scheduling.token_times import TokenTimes
from alignedserve.timing.estimate import Estimate

# The value, in seconds, of a request that is worth next to nothing.
LITTLE_S = 1e-6


class AptDecode(DecodePart):
    """On a colocated instance, candidates are prompts as well."""

    def __init__(
        self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate | None = None
    ) -> None:
        """`estimate` predicts the cost of kept inputs. Without it, none are kept."""
        super().__init__(limits, config)
        self._times = TokenTimes()
        self._estimate = estimate if limits.can_keep_inputs else None
        # The loss per kept token in the current plan.
        self._loss_s = 0.0

    def plan(self, at: DecodeBoundary) -> None:
        waiting = self._look(at)
        ready, begun = at.ready_and_pending()
        self._admit(at, [each for each in waiting if each.is_returning])
        prompts = [each for each in waiting if not each.is_returning]
        if self._pending_s([*begun, *prompts], at.now) > self._pending_s(ready, at.now):
            for request in begun:
                decoding.compute(at, request, at.num_tokens_left)
            if self._admit(at, prompts) or begun:
                return
        at.run_many(self._in_order(self._worth_running(ready, at.now), at))
        if not ready:
            # No request has waited, because all have just come.
            for request in begun:
                decoding.compute(at, request, at.num_tokens_left)
            self._admit(at, [each for each in prompts if not each.num_columns])

    def _look(self, at: DecodeBoundary) -> list[DecodeRequest]:
        """Lets requests leave, and returns the waiting ones."""
        waiting = [each for each in (*at.requests, *at.batch) if not decoding.should_wait(at, each)]
        self._times.look([*at.running, *waiting], at.now)
        self._make_room(at)
        self._loss_s = self._loss_of_a_token_s(at)
        at.drop(self._switching(at))
        # Among several owners, it chooses only from as many as there are slots. A long wait passes no owner.
        return waiting[: at.num_free_slots] if at.owners_compete else waiting

    def in_eviction_order(
        self, requests: Sequence[DecodeRequest], at: DecodeBoundary
    ) -> Sequence[DecodeRequest]:
        """Returns the requests worth least per block first. Those that were already to be evicted at the last boundary
        stay in front."""
        self._times.look(requests, at.now)
        in_order = self._in_order(requests, at)
        in_order.reverse()
        return sorted(in_order, key=lambda request: not at.was_evicted(request))

    def worth_s(self, request: DecodeRequest, now: float) -> float:
        is_late = request.is_rt and self._times.left_s(request, now) < 0
        return LITTLE_S if is_late else max(now - request.mark.since_s, LITTLE_S)

    # ---- which requests leave ----------------------------------------------------------------------------------------

    def _make_room(self, at: DecodeBoundary) -> None:
        """Lets requests leave so that the others can grow. Requests with inputs are dropped only if there is no block
        for the next iteration, because dropping frees their blocks at once."""
        leaving = decoding.victims(at, self.config.evict_ahead, self.in_eviction_order)
        self.preempt(at, [request for request in leaving if request.layout.holds_kv])
        if any(not request.layout.holds_kv for request in leaving):
            missing = decoding.victims(at, 1, self.in_eviction_order)
            at.drop([request for request in missing if not request.layout.holds_kv])

    def _switching(self, at: DecodeBoundary) -> list[DecodeRequest]:
        """Returns the requests with kept inputs that would not begin with inputs now, if there is room for their KV."""
        num_free = decoding.num_free(at, self.config)
        found = []
        for request in self._in_order((each for each in at.running if not each.layout.holds_kv), at):
            num_more = self._num_blocks(request, at, decoding.num_ahead(self.config)) - request.num_blocks
            if request.num_pending == 1 and num_more <= num_free and not self._pays(request, at.now):
                found.append(request)
                num_free -= num_more
        return found

    # ---- the cost of kept inputs -------------------------------------------------------------------------------------

    def _loss_of_a_token_s(self, at: DecodeBoundary) -> float:
        """Returns how much longer all requests together wait in an iteration, per token that is kept as inputs."""
        if self._estimate is None:
            return 0.0
        num_requests = len(at.requests) + len(at.batch) + len(at.running)
        return num_requests * self._estimate.restored_token_s

    def _gain_s(self, request: DecodeRequest, now: float) -> float:
        """Returns the worth of an iteration with its inputs."""
        return self.worth_s(request, now) - self._loss_s * request.num_tokens

    def _pays(self, request: DecodeRequest, now: float) -> bool:
        """Returns whether half of the memory, with inputs, gains more than half of what all of it gains with KV."""
        return 2 * self._gain_s(request, now) > self.worth_s(request, now)

    def _worth_running(self, ready: list[DecodeRequest], now: float) -> list[DecodeRequest]:
        """Returns the requests that gain more by running than they cost the others; all of them if none does."""
        found = [each for each in ready if each.layout.holds_kv or self._gain_s(each, now) > 0]
        return found or ready

    # ---- which requests begin ----------------------------------------------------------------------------------------

    def _pieces(self, request: DecodeRequest, at: DecodeBoundary) -> list[Piece]:
        """Returns all memory of its KV as one piece, or as one half after the other."""
        worth_s, memory = self.worth_s(request, at.now), self._num_blocks(request, at)
        needed = decoding.needed(at, request, self.config)
        whole = [Piece(request, PLAIN, worth_s, memory, needed)]
        if self._estimate is None or request.num_pooled:
            return whole
        gain_s = worth_s - self._loss_s * request.num_tokens
        if 2 * gain_s <= worth_s:
            return whole
        half = at.growth_of(request, decoding.num_ahead(self.config), INPUTS)
        if half >= needed:
            # It is short, or shares most of its KV.
            return whole
        return [
            Piece(request, INPUTS, gain_s, memory / 2, half),
            Piece(request, PLAIN, worth_s - gain_s, memory / 2, needed - half, is_second=True),
        ]

    def _num_blocks(self, request: DecodeRequest, at: DecodeBoundary, num_more: int = 1) -> int:
        """Returns the number of blocks of its KV with `num_more` more tokens."""
        return at.limits.span.num_held(request.num_cached, request.num_tokens + num_more)

    def _in_order(self, requests: Iterable[DecodeRequest], at: DecodeBoundary) -> list[DecodeRequest]:
        """Returns the requests worth most per block first."""

        now, num_held = at.now, at.limits.span.num_held

        def density(request: DecodeRequest) -> float:
            return self.worth_s(request, now) / num_held(request.num_cached, request.num_tokens + 1)

        return sorted(requests, key=density, reverse=True)

    def _admit(
        self, at: DecodeBoundary, candidates: Iterable[DecodeRequest], num_tokens: int | None = None
    ) -> bool:
        """Returns whether any prompt began to compute. `num_tokens` bounds the prompt tokens that they compute."""
        has_begun, num_left = False, at.num_tokens_left if num_tokens is None else num_tokens
        if num_left <= 0:
            candidates = [each for each in candidates if each.is_returning]
        num_free = decoding.num_free(at, self.config)
        pieces = (piece for request in candidates for piece in self._pieces(request, at))
        for choice in choose(pieces, num_free, at.num_free_slots):
            request = choice.request
            if not request.is_returning and num_left <= 0:
                break
            if decoding.should_wait(at, request):
                continue
            at.admit(request, choice.layout)
            if not request.num_pooled:
                has_begun = True
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
        ready, begun = at.ready_and_pending()
        self._admit(at, [each for each in waiting if each.is_returning])
        decodes = self._in_order(self._worth_running(ready, at.now), at)
        with_inputs = [each for each in decodes if not each.layout.holds_kv]
        at.run_many([each for each in decodes if each.layout.holds_kv])
        restoring_s = self._restoring_s([*with_inputs, *begun])
        num_left = tokens_beside(at, self._time, [each.num_read for each in decodes], restoring_s)
        num_left = min(num_left, at.num_tokens_left - len(with_inputs))
        for request in self._in_order(begun, at):
            num_left -= decoding.compute(at, request, num_left)
        at.run_many(with_inputs)
        self._admit(at, [each for each in waiting if not each.is_returning], num_left)

    def _restoring_s(self, requests: Iterable[DecodeRequest]) -> float:
        """Returns the seconds to restore the KV of the requests with kept inputs."""
        num_tokens = sum(each.num_cached for each in requests if not each.layout.holds_kv)
        return num_tokens * self._time.restored_token_s if self._time else 0.0


class AptRouter(RouterPart):
    def start(self, island: Island) -> Iterator[RoutedRequest]:
        """Starts new requests without waiting for evicted ones, because instances decide which goes first."""
        room = routing.room_to_choose(island, self.config.prefill_window)
        yield from routing.start_line(island, 0, room)


class Apt(Policy):
    name = "apt"
    summary = "longest wait per needed memory first; late requests go last"
    layouts = (INPUTS,)

    def router(self) -> RouterPart:
        return AptRouter(self.config)

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptDecode(limits, self.config)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptDecode(limits, self.config, estimate)


class AptS(Apt):
    name = "apt-s"
    summary = "like apt, with prompts in chunks beside decodes"

    def decode(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptSDecode(limits, self.config, estimate)

    def colocated(self, limits: InstanceLimits, estimate: Estimate | None) -> DecodePart:
        return AptSDecode(limits, self.config, estimate)
