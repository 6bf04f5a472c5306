"""One request as the gateway sees it, from its opening to its end. Metrics, and traces if they are enabled, are derived
from this."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from alignedserve.gateway.http.request_id import CurrentCall, current_call
from alignedserve.gateway.telemetry.metrics import Metrics, TierMetrics
from alignedserve.lengths.prediction import Prediction
from alignedserve.protocol.messages import Request

# (state, seconds since the router accepted the request).
Timeline = Sequence[tuple[str, float]]


@dataclass(eq=False, slots=True)
class RequestStats:
    request: Request
    # The call that the request belongs to. None: it is a line of a batch.
    call: CurrentCall | None
    _metrics: Metrics
    # `_on_end` is called when the request has ended. `_on_timeline` is called when, in addition, its whole timeline is
    # known.
    _on_end: Callable[[RequestStats], None]
    _on_timeline: Callable[[RequestStats], None]
    # The prediction of its length. None: there was no time for one, or there is no predictor.
    prediction: Prediction | None = None
    # When it was submitted to the router that reports its timeline.
    submitted_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    # "stop", "length", "abort", "error", "rejected". None: it has not ended.
    end_reason: str | None = None
    end_s: float = 0.0
    # The timeline as reported by the router: up to the first token, and finally the whole.
    timeline: Timeline = ()
    _tier: TierMetrics = field(init=False)
    # A call begins with its first byte.
    begun_s: float = field(init=False)
    _is_late: bool = False

    def __post_init__(self) -> None:
        self._tier = self._metrics.of(self.request.tier)
        self.begun_s = self.call.begun_s if self.call else self.request.arrival_s
        if self.call:
            self.call.tier = self.request.tier
            self.call.num_prompt_tokens += len(self.request.prompt)
        self._tier.predicted_by[self.prediction.source if self.prediction else "none"] += 1

    @property
    def owner(self) -> str:
        """The owner of its call's API key. Empty for a line of a batch."""
        return self.call.owner if self.call else ""

    @property
    def predicted_len(self) -> int:
        return self.prediction.length if self.prediction else 0

    def opened(self) -> None:
        """Called when an island has accepted it. It is among the open requests until it has ended."""
        self._tier.open.add(self)

    def submitted(self, is_again: bool) -> None:
        self.submitted_s = time.monotonic()
        self._metrics.num_resubmitted += is_again

    def tokens(self, count: int, now: float) -> None:
        if self.first_s is None:
            self._first(now)
        else:
            self._tier.inter_token_latency.observe(now - self.last_s)
            self._tier.silences.add(now - self.last_s, now)
        self.last_s = now
        self.num_tokens += count
        if self.call:
            self.call.num_completion_tokens += count
        self._tier.num_output_tokens += count
        if self.request.tbt_s is not None and now > self._due_s(self.request.tbt_s, self.num_tokens):
            self._is_late = True

    def embedded(self, now: float) -> None:
        """Called when its embedding has arrived, which is its only output."""
        self._first(now)
        self.last_s = now

    def ended(self, reason: str, is_told: bool = True) -> None:
        """Called when the request has ended. With `is_told`, the router has reported the whole timeline; otherwise
        `told` is called later. Safe to repeat: the first call counts."""
        if self.end_reason is not None:
            return
        self.end_reason, self.end_s = reason, time.monotonic()
        self._tier.open.discard(self)
        self._tier.ended[reason] += 1
        if self.first_s is not None:
            self._count(self.first_s)
        self._judge()
        self._compare()
        self._on_end(self)
        if is_told:
            self._on_timeline(self)

    def rejected(self, reason: str) -> None:
        """Called when the router has rejected it for this reason (Rejected)."""
        self._tier.num_turned_away += reason in ("full", "owner_full")
        self.ended("rejected")

    def silence_s(self, now: float) -> float:
        return 0.0 if self.first_s is None else now - self.last_s

    def keeps(self, slo: str, now: float) -> bool | None:
        """A token that is due and has not arrived counts as late."""
        ttft_s, tbt_s = self.request.ttft_s, self.request.tbt_s
        if slo == "ttft" and ttft_s is not None:
            if self.first_s is None:
                return False if now > self.begun_s + ttft_s else None
            return self.first_s <= self.begun_s + ttft_s
        if slo == "tbt" and tbt_s is not None and self.first_s is not None:
            return not self._is_late and now <= self._due_s(tbt_s, self.num_tokens + 1)
        return None

    def told(self, timeline: Timeline | None = None) -> None:
        """Called after the end with the whole timeline. None: there will be none."""
        if timeline is not None:
            self.timeline = timeline
        self._on_timeline(self)

    def _first(self, now: float) -> None:
        self.first_s = now
        self._tier.time_to_first_token.observe(now - self.begun_s)
        self._tier.num_prompt_tokens += len(self.request.prompt)

    def _due_s(self, tbt_s: float, number: int) -> float:
        """Returns when the token with this number is due; the first is 1."""
        assert self.first_s is not None
        ttft_s = self.request.ttft_s
        first_due_s = self.first_s if ttft_s is None else max(self.begun_s + ttft_s, self.first_s)
        return first_due_s + (number - 1) * tbt_s

    def _count(self, first_s: float) -> None:
        tier = self._tier
        tier.e2e_latency.observe(self.end_s - self.begun_s)
        tier.decode_time.observe(self.last_s - first_s)
        tier.prompt_len.observe(len(self.request.prompt))
        tier.output_len.observe(self.num_tokens)
        if self.num_tokens > 1:
            tier.time_per_output_token.observe((self.last_s - first_s) / (self.num_tokens - 1))
        prefill_s = next((offset_s for state, offset_s in self.timeline if state == "prefilling"), None)
        if prefill_s is not None:
            waited_s = self.submitted_s - self.begun_s + prefill_s
            tier.queue_time.observe(waited_s)
            tier.prefill_time.observe(max(first_s - self.begun_s - waited_s, 0.0))

    def _compare(self) -> None:
        """Compares its length with the prediction, unless the client gave the length."""
        if self.end_reason not in ("stop", "length") or not self.num_tokens:
            return
        if self.prediction and self.prediction.length and self.prediction.source != "given":
            error = abs(self.prediction.length - self.num_tokens) / self.num_tokens
            self._tier.length_error.observe(error)

    def _judge(self) -> None:
        """Counts whether its objectives were met. A request of a client that disconnects misses none. A batch line that
        ends by its deadline is counted by its job, together with the lines that never began."""
        if self.end_reason in ("abort", "rejected"):
            return
        request, met = self.request, self._tier.objectives
        is_whole = self.end_reason in ("stop", "length")
        if request.ttft_s is not None:
            met["ttft", self.first_s is not None and self.first_s <= self.begun_s + request.ttft_s] += 1
        if request.tbt_s is not None:
            met["tbt", is_whole and not self._is_late] += 1
        if request.deadline_s is not None:
            met["deadline", is_whole and self.end_s <= request.deadline_s] += 1


class Traces(Protocol):
    def around(self, call: CurrentCall) -> AbstractContextManager[object]:
        """Opens the call's span, which ends with the block."""

    def ended(self, stats: RequestStats) -> None:
        """Makes all spans of an ended request."""

    def close(self) -> None:
        """Sends the remaining spans."""


class NoTraces:
    def around(self, call: CurrentCall) -> AbstractContextManager[object]:
        return nullcontext()

    def ended(self, stats: RequestStats) -> None:
        pass

    def close(self) -> None:
        pass


class Telemetry:
    def __init__(
        self, traces: Traces | None = None, learn: Callable[[RequestStats], None] = lambda stats: None
    ) -> None:
        """`learn` is called with each request that has ended."""
        self.metrics = Metrics()
        self.traces = traces or NoTraces()
        self._learn = learn

    def opened(self, request: Request, prediction: Prediction | None = None) -> RequestStats:
        call = current_call.get()
        if call and call.is_over:
            call = None
        return RequestStats(request, call, self.metrics, self._learn, self.traces.ended, prediction)
