"""One request as the gateway sees it, from when it was opened until it ended; metrics and traces are made of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from alignedserve.gateway.http.request_id import HttpCall
from alignedserve.gateway.telemetry.metrics import Metrics, TierMetrics
from alignedserve.lengths.prediction import Prediction
from alignedserve.protocol.messages import Request

# (state, seconds since the router took the request).
Timeline = Sequence[tuple[str, float]]


@dataclass(eq=False, slots=True)
class RequestStats:
    request: Request
    # The call that the request is a part of; None for a line of a batch.
    call: HttpCall | None
    _metrics: Metrics
    # This is called when the request has ended and, if that is later, when all of its timeline is known.
    _on_end: Callable[[RequestStats], None]
    _on_timeline: Callable[[RequestStats], None]
    # The prediction of its length; None: there was no time for one, or no predictor.
    prediction: Prediction | None = None
    # When it was submitted to the router that reports its timeline.
    submitted_s: float = 0.0
    first_s: float | None = None
    last_s: float = 0.0
    num_tokens: int = 0
    # "stop", "length", "abort", "error", "rejected"; None while it goes on.
    end_reason: str | None = None
    end_s: float = 0.0
    # The timeline that the router has reported: up to the first token, and in the end all.
    timeline: Timeline = ()
    _tier: TierMetrics = field(init=False)
    # The time of a call starts with its first byte.
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
        """That of its call's key; empty for a line of a batch, too."""
        return self.call.owner if self.call else ""

    @property
    def predicted_len(self) -> int:
        return self.prediction.length if self.prediction else 0

    def submitted(self, is_again: bool) -> None:
        self.submitted_s = time.monotonic()
        self._metrics.num_resubmitted += is_again

    def tokens(self, count: int, now: float) -> None:
        if self.first_s is None:
            self._first(now)
        else:
            self._tier.inter_token_latency.observe(now - self.last_s)
        self.last_s = now
        self.num_tokens += count
        if self.call:
            self.call.num_completion_tokens += count
        self._tier.num_output_tokens += count
        if self.request.tbt_s is not None and now > self._due_s(self.request.tbt_s):
            self._is_late = True

    def embedded(self, now: float) -> None:
        """Its embedding has come, which is all that it will get."""
        self._first(now)
        self.last_s = now

    def ended(self, reason: str, is_told: bool = True) -> None:
        """The request has ended. With `is_told`, the router has reported all of its timeline; otherwise `told` is
        called when it has. Safe to repeat; the first call counts."""
        if self.end_reason is not None:
            return
        self.end_reason, self.end_s = reason, time.monotonic()
        self._tier.ended[reason] += 1
        if self.first_s is not None:
            self._count(self.first_s)
        self._judge()
        self._compare()
        self._on_end(self)
        if is_told:
            self._on_timeline(self)

    def rejected(self, reason: str) -> None:
        """The router has not taken it, for this reason (Rejected)."""
        self._tier.num_turned_away += reason == "full"
        self.ended("rejected")

    def told(self, timeline: Timeline | None = None) -> None:
        """The request had ended before: this is the rest of its timeline; None if there will be none."""
        if timeline is not None:
            self.timeline = timeline
        self._on_timeline(self)

    def _first(self, now: float) -> None:
        self.first_s = now
        self._tier.time_to_first_token.observe(now - self.begun_s)
        self._tier.num_prompt_tokens += len(self.request.prompt)

    def _due_s(self, tbt_s: float) -> float:
        """Returns when the last of its tokens so far was due."""
        assert self.first_s is not None
        ttft_s = self.request.ttft_s
        first_due_s = self.first_s if ttft_s is None else max(self.begun_s + ttft_s, self.first_s)
        return first_due_s + (self.num_tokens - 1) * tbt_s

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
        """Compares its length with the prediction, unless that was given."""
        if self.end_reason not in ("stop", "length") or not self.num_tokens:
            return
        if self.prediction and self.prediction.length and self.prediction.source != "given":
            error = abs(self.prediction.length - self.num_tokens) / self.num_tokens
            self._tier.length_error.observe(error)

    def _judge(self) -> None:
        """Counts whether its objectives were met. A request whose client leaves misses none; a batch line that its
        deadline ends is counted by its job, with those that never began."""
        if self.end_reason in ("abort", "rejected"):
            return
        request, met = self.request, self._tier.objectives
        is_whole = self.end_reason in ("stop", "length")
        if request.ttft_s is not None:
            is_met = self.first_s is not None and self.first_s <= self.begun_s + request.ttft_s
            met["ttft", is_met] += 1
        if request.tbt_s is not None:
            met["tbt", is_whole and not self._is_late] += 1
        if request.deadline_s is not None:
            met["deadline", is_whole and self.end_s <= request.deadline_s] += 1
