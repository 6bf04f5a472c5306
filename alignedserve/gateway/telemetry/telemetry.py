"""Metrics, and traces if they are enabled."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from alignedserve.gateway.http.request_id import HttpCall, current_call
from alignedserve.gateway.telemetry.metrics import Metrics
from alignedserve.gateway.telemetry.request_stats import RequestStats
from alignedserve.lengths.prediction import Prediction
from alignedserve.protocol.messages import Request


class Traces(Protocol):
    def around(self, call: HttpCall) -> AbstractContextManager[object]:
        """Opens the call's span, which ends with the block."""

    def ended(self, stats: RequestStats) -> None:
        """Makes all spans of an ended request."""

    def close(self) -> None:
        """Sends the remaining spans."""


class NoTraces:
    def around(self, call: HttpCall) -> AbstractContextManager[object]:
        return nullcontext()

    def ended(self, stats: RequestStats) -> None:
        pass

    def close(self) -> None:
        pass


def check_extra() -> None:
    """Raises ValueError if what traces need is not installed."""
    try:
        import alignedserve.gateway.telemetry.traces  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"otlp_endpoint: needs OpenTelemetry; pip install 'alignedserve[otel]' ({error})"
        ) from None


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
