"""Spans: in memory, and as a receiver of OTLP gets them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise

import pytest

pytest.importorskip("opentelemetry.sdk")

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes

from alignedserve.gateway.telemetry.telemetry import RequestStats, Telemetry
from alignedserve.gateway.telemetry.traces import OtelTraces, stages
from alignedserve.protocol.messages import Abort, AnyMessage, Hello, Request, Tokens
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestKey
from tests.gateway.observed import observed
from tests.gateway.scripted import ScriptedRouter
from tests.gateway.served import play

STORY = [
    *(("queued", 0.0), ("reserving", 0.25), ("prefilling", 1.0), ("pooled", 2.0), ("offered", 3.0)),
    *(("running", 4.0), ("making room", 5.0), ("evicting", 6.0), ("pooled", 7.0), ("running", 8.0)),
]


def submitted(telemetry: Telemetry) -> RequestStats:
    request = Request(RequestKey(1), [1] * 8, SamplingParams(), seed=0, arrival_s=99.5)
    stats = telemetry.opened(request)
    stats.submitted(is_again=False)
    stats.submitted_s = 100.0
    return stats


def test_stages_follow_each_other_from_the_queue_to_the_end() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry(OtelTraces(SimpleSpanProcessor(exporter)))
    stats = submitted(telemetry)
    stats.timeline = STORY
    stats.tokens(1, 102.0)
    stats.ended("stop")
    *parts, whole = exporter.get_finished_spans()
    names = ["queue", "prefill", "pool", "admit", "decode", "evict", "pool", "decode"]
    assert [span.name for span in parts] == names
    assert whole.name == "request" and whole.context
    for span, follower in pairwise(parts):
        assert span.end_time == follower.start_time
        assert span.parent and span.parent.span_id == whole.context.span_id
    assert [seconds(span) for span in parts[:4]] == [1.0, 1.0, 1.0, 1.0]
    assert whole.attributes and whole.attributes["completion_tokens"] == 1


def test_a_requests_span_has_the_attributes_of_generative_ai() -> None:
    exporter = InMemorySpanExporter()
    telemetry = Telemetry(OtelTraces(SimpleSpanProcessor(exporter), "demo"))
    stats = submitted(telemetry)
    stats.tokens(1, 102.0)
    stats.ended("stop")
    pooled = telemetry.opened(
        Request(
            RequestKey(2), [1] * 3, SamplingParams(), seed=0, arrival_s=1.0, pooling="last", adapter="law"
        )
    )
    pooled.ended("stop")
    known = {each for name, each in vars(gen_ai_attributes).items() if name.startswith("GEN_AI_")}
    found = [
        {name: value for name, value in (span.attributes or {}).items() if name.startswith("gen_ai.")}
        for span in exporter.get_finished_spans()
        if span.name == "request"
    ]
    assert all(each.keys() <= known for each in found)
    tokens, embedding = found
    assert tokens["gen_ai.operation.name"] == "text_completion" and tokens["gen_ai.request.model"] == "demo"
    assert tokens["gen_ai.usage.input_tokens"] == 8 and tokens["gen_ai.usage.output_tokens"] == 1
    assert tokens["gen_ai.response.finish_reasons"] == ("stop",)
    assert tokens["gen_ai.response.time_to_first_chunk"] == 102.0 - 99.5
    assert embedding == {
        "gen_ai.operation.name": "embeddings",
        "gen_ai.provider.name": "alignedserve",
        "gen_ai.request.model": "law",
        "gen_ai.response.model": "law",
        "gen_ai.usage.input_tokens": 3,
    }


def test_a_chats_span_says_so() -> None:
    async def scenario() -> None:
        async with observed(otlp_endpoint=endpoint) as at:
            assert (await at.chat()).status_code == 200

    with receiving() as (endpoint, spans):
        play(scenario)
    (whole,) = (span for span in spans if span.name == "request")
    found = {each.key: each.value.string_value for each in whole.attributes}
    assert (found["gen_ai.operation.name"], found["gen_ai.response.model"]) == ("chat", "demo")


def seconds(span: ReadableSpan) -> float:
    assert span.start_time and span.end_time
    return round((span.end_time - span.start_time) / 1e9, 6)


def test_what_the_router_did_after_the_end_is_no_stage() -> None:
    stats = submitted(Telemetry())
    stats.ended("abort", is_told=False)
    stats.end_s = 102.5
    stats.told(STORY)
    assert stages(stats) == [("queue", 100.0, 101.0), ("prefill", 101.0, 102.0), ("pool", 102.0, 102.5)]


class Telling(ScriptedRouter):
    """When a request is aborted, how far it came."""

    def received(self, hello: Hello, message: AnyMessage) -> None:
        super().received(hello, message)
        if isinstance(message, Abort):
            offset_s = [("queued", 0.0), ("prefilling", 1e-6), ("running", 2e-6)]
            self.hub.send(hello.instance_id, Tokens([], dict.fromkeys(message.keys, offset_s)))


def unfinished(router: ScriptedRouter) -> ScriptedRouter:
    """It would go on."""
    router.allowed = len(router.answer) - 1
    return router


def test_a_request_that_a_stop_string_ends_is_told_to_its_end() -> None:
    async def scenario() -> None:
        async with observed(unfinished(Telling()), otlp_endpoint=endpoint) as at:
            answer = await at.chat(stop=["two"])
            assert answer.json()["choices"][0]["finish_reason"] == "stop"
            await at.router.until(lambda: bool(at.router.aborted))
            # what it answered to that has come when it answers this
            await at.http.get("/v1/cluster")

    with receiving() as (endpoint, spans):
        play(scenario)
        by_name = {span.name: span for span in spans}
    whole = by_name["request"]
    assert set(by_name) >= {"queue", "prefill", "decode"}
    assert by_name["decode"].end_time_unix_nano == whole.end_time_unix_nano


def test_a_request_that_no_router_tells_of_any_more_is_traced_all_the_same() -> None:
    async def scenario() -> None:
        # says nothing of what is aborted, and goes
        async with observed(unfinished(ScriptedRouter()), otlp_endpoint=endpoint) as at:
            await at.chat(stop=["two"])
            await at.router.until(lambda: bool(at.router.aborted))

    with receiving() as (endpoint, spans):
        play(scenario)
    assert [span.name for span in spans].count("request") == 1


class Receiver(BaseHTTPRequestHandler):
    spans: list[Span]

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans.extend(scope.spans)
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def receiving() -> Iterator[tuple[str, list[Span]]]:
    spans: list[Span] = []
    handler = type("Handler", (Receiver,), {"spans": spans})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", spans
        finally:
            server.shutdown()
            thread.join()


def test_a_call_is_traced_under_its_clients_span() -> None:
    parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"

    async def scenario() -> None:
        async with observed(otlp_endpoint=endpoint) as at:
            await at.chat({"traceparent": parent, "X-Request-Id": "r-1"}, stream=True)
            await at.http.get("/health")

    with receiving() as (endpoint, spans):
        play(scenario)
        by_name = {span.name: span for span in spans}
    assert set(by_name) == {"POST /v1/chat/completions", "gateway", "request"}
    assert {span.trace_id.hex() for span in spans} == {parent.split("-")[1]}
    call = by_name["POST /v1/chat/completions"]
    assert call.parent_span_id.hex() == parent.split("-")[2]
    assert by_name["gateway"].parent_span_id == by_name["request"].parent_span_id == call.span_id
    said = {each.key: each.value for each in call.attributes}
    assert said["request_id"].string_value == "r-1"
    assert said["http.response.status_code"].int_value == 200
