"""OpenTelemetry: a span per HTTP call, with a span for each stage of its requests.

    POST /v1/chat/completions
      gateway                      reading, tokenising, checking
      request
        queue -> prefill -> pool (-> stage) -> admit -> decode        repeated after a loss or an eviction

A request's spans are made at its end, from the router's timeline and the times that the gateway recorded. The router's
clock is not compared with the gateway's: the timeline begins when the gateway submitted the request.

A request's span has the attributes of OpenTelemetry's conventions for generative AI (`gen_ai.*`). None of them holds
text of a client.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from alignedserve.engine.lora_modules import name_of
from alignedserve.gateway.http.request_id import CurrentCall
from alignedserve.gateway.telemetry.telemetry import RequestStats
from alignedserve.version import __version__

# The router's states as stages of a request. The last stage ends with the request, and has no state.
STAGES = {
    "queued": "queue",
    "reserving": "queue",
    "prefilling": "prefill",
    "pooled": "pool",
    "staged": "stage",
    "offered": "admit",
    "running": "decode",
    "making room": "decode",
    "evicting": "evict",
    "leaving": "recover",
}
EXPORT_TIMEOUT_S = 5.0
# Calls of these paths are chats; other calls that make tokens complete a text.
CHATS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
PROVIDER = "alignedserve"


class OtelTraces:
    def __init__(self, processor: SpanProcessor, model_name: str = "") -> None:
        self._model_name = model_name
        resource = Resource.create({"service.name": "alignedserve"})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("alignedserve", __version__)
        # Nanoseconds between the Unix epoch and the start of time.monotonic().
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    @contextmanager
    def around(self, call: CurrentCall) -> Iterator[None]:
        parent = propagate.extract(dict(call.headers))
        span = self._tracer.start_span(
            call.method, parent, SpanKind.SERVER, start_time=self._ns(call.begun_s)
        )
        call.trace = trace.set_span_in_context(span, parent)
        try:
            yield
        finally:
            span.update_name(f"{call.method} {call.path}")
            said = {"http.request.method": call.method, "http.route": call.path}
            span.set_attributes(said | {"http.response.status_code": call.status, "request_id": call.id})
            if call.status >= 500 or not call.status:
                span.set_status(Status(StatusCode.ERROR))
            # A span that never ends is never sent.
            if not call.is_routine:
                span.end()

    def ended(self, stats: RequestStats) -> None:
        call, request = stats.call, stats.request
        parent = call.trace if call else None
        if call and call.trace:
            self._span("gateway", parent, call.begun_s, request.arrival_s)
        span = self._tracer.start_span("request", parent, start_time=self._ns(request.arrival_s))
        span.set_attributes(
            {
                "tier": request.tier,
                "prompt_tokens": len(request.prompt),
                "completion_tokens": stats.num_tokens,
                "finish_reason": stats.end_reason or "",
            }
        )
        span.set_attributes(gen_ai(stats, self._model_name))
        if stats.end_reason == "error":
            span.set_status(Status(StatusCode.ERROR))
        if stats.first_s is not None:
            span.add_event("first token", timestamp=self._ns(stats.first_s))
        inside = trace.set_span_in_context(span, parent)
        for name, begin_s, end_s in stages(stats):
            self._span(name, inside, begin_s, end_s)
        span.end(self._ns(stats.end_s))

    def close(self) -> None:
        self._provider.shutdown()

    def _span(self, name: str, parent: Context | None, begin_s: float, end_s: float) -> None:
        self._tracer.start_span(name, parent, start_time=self._ns(begin_s)).end(self._ns(end_s))

    def _ns(self, monotonic_s: float) -> int:
        return int(monotonic_s * 1e9) + self._offset_ns


class OtlpTraces(OtelTraces):
    def __init__(self, endpoint: str, model_name: str = "") -> None:
        """`endpoint` is the URL of an OTLP receiver over HTTP, such as http://127.0.0.1:4318."""
        path = "" if endpoint.rstrip("/").endswith("/v1/traces") else "/v1/traces"
        super().__init__(
            BatchSpanProcessor(OTLPSpanExporter(endpoint.rstrip("/") + path, timeout=EXPORT_TIMEOUT_S)),
            model_name,
        )


def gen_ai(stats: RequestStats, model_name: str) -> dict[str, AttributeValue]:
    """Returns the attributes of a request that has ended."""
    request, params = stats.request, stats.request.params
    model = name_of(request.adapter) or model_name
    found: dict[str, AttributeValue | None] = {
        "gen_ai.operation.name": _operation(stats),
        "gen_ai.provider.name": PROVIDER,
        "gen_ai.request.model": model,
        "gen_ai.response.model": model,
        "gen_ai.usage.input_tokens": len(request.prompt),
    }
    if not request.is_embedding:
        found |= {
            "gen_ai.request.max_tokens": params.max_tokens,
            "gen_ai.request.temperature": params.temperature,
            "gen_ai.request.top_p": params.top_p,
            "gen_ai.usage.output_tokens": stats.num_tokens,
            "gen_ai.response.finish_reasons": [stats.end_reason] if stats.end_reason else None,
        }
        if stats.first_s is not None:
            found["gen_ai.response.time_to_first_chunk"] = stats.first_s - stats.begun_s
    return {name: value for name, value in found.items() if value is not None}


def _operation(stats: RequestStats) -> str:
    if stats.request.is_embedding:
        return "embeddings"
    # The line of a batch has no call.
    return "chat" if stats.call and stats.call.asked_path in CHATS else "text_completion"


def stages(stats: RequestStats) -> list[tuple[str, float, float]]:
    """Returns each stage's name, begin and end, in seconds of time.monotonic()."""
    begins: list[tuple[str, float]] = []
    for state, offset_s in stats.timeline:
        name, begin_s = STAGES.get(state, state), stats.submitted_s + offset_s
        # States after the request's end, before the router learned of it, do not count.
        is_after = bool(begins) and begin_s >= stats.end_s
        if not is_after and (not begins or begins[-1][0] != name):
            begins.append((name, begin_s))
    if not begins:
        return []
    ends = [*(begin_s for _, begin_s in begins[1:]), stats.end_s]
    return [(name, begin_s, max(begin_s, end_s)) for (name, begin_s), end_s in zip(begins, ends, strict=True)]
