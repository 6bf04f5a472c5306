"""What is kept of a response is what was sent."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest

from alignedserve.gateway.generation.generation import Delta, Usage
from alignedserve.gateway.generation.prepared import Answering
from alignedserve.gateway.generation.service import Service
from alignedserve.gateway.openai.responses.builder import ResponsesBuilder
from alignedserve.gateway.openai.responses.replay import written
from alignedserve.gateway.tools.readers import TextReader
from tests.gateway.scripted import MODEL

USAGE = Usage(1, 1)


def builder_of(num_logprobs: int | None = None) -> ResponsesBuilder:
    answering = Answering(MODEL, Service(), [[5]], created=0)
    return ResponsesBuilder(answering, b'{"tools":[]}', TextReader, num_logprobs)


def delta_of(text: str, token: int = 30, finish_reason: str | None = None) -> Delta:
    return Delta(0, text, [token], [(-0.25, 1, {token: -0.25})], finish_reason)


def events_in(pieces: Iterable[Any]) -> list[dict[str, Any]]:
    text = b"".join(pieces).decode()
    return [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n") if event]


def streamed(builder: ResponsesBuilder, deltas: Sequence[Delta]) -> list[dict[str, Any]]:
    pieces: list[Any] = []
    for delta in deltas:
        pieces += builder.opening(delta, USAGE) or ()
        pieces += builder.events(delta, USAGE)
    return events_in([*pieces, *builder.end(USAGE)])


def test_a_response_has_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of()
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    builder.add(Delta(0, "x", [30], [], "stop"))
    kept = builder.finished(USAGE)
    monkeypatch.setattr(time, "time", lambda: 2000.0)
    assert builder.finished(USAGE) == kept and kept["completed_at"] == 1000


def test_each_token_of_a_message_has_its_log_probability() -> None:
    """Also half a character, and a token that ends the message without a text."""
    texts = ["", "a", "", "", "\u00e9", "b", ""]
    deltas = [delta_of(text, 30 + number) for number, text in enumerate(texts)]
    deltas[-1] = delta_of("", 40, "stop")
    builder = builder_of(num_logprobs=0)
    events = streamed(builder, deltas)
    (part,) = events[-1]["response"]["output"][0]["content"]
    expected = [MODEL.token_text(token) for token in (30, 31, 32, 33, 34, 35, 40)]
    assert [each["token"] for each in part["logprobs"]] == expected and part["text"] == "a\u00e9b"
    told = [each for event in events if event["type"].endswith("text.delta") for each in event["logprobs"]]
    assert told == part["logprobs"]
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    assert done["logprobs"] == part["logprobs"]
    whole = builder_of(num_logprobs=0)
    for delta in deltas:
        whole.add(delta)
    assert json.loads(b"".join(whole.whole(USAGE)))["output"][0]["content"] == [part]


def test_no_piece_of_an_event_is_made_of_all_that_came_before() -> None:
    """The log-probabilities of a message are in four events, and each is the same bytes."""
    builder = builder_of(num_logprobs=0)
    for _ in range(500):
        builder.add(delta_of("word "))
    pieces = [*builder.events(delta_of("end", finish_reason="stop"), USAGE), *builder.end(USAGE)]
    large = {id(piece) for piece in pieces if len(piece) > 10_000}
    assert len(large) == 1 and sum(len(piece) > 10_000 for piece in pieces) == 4


def test_what_is_kept_gives_the_events_that_were_sent() -> None:
    builder = builder_of(num_logprobs=0)
    events = streamed(builder, [delta_of('He said "a"'), delta_of("\n", finish_reason="length")])
    output = b"".join(builder.output.items)
    assert builder.output.num_bytes == len(output)
    state = json.dumps(builder.finished(USAGE)).encode()
    again = events_in(written(state, memoryview(output), builder.output.places, builder.repeated))
    assert [event["type"] for event in again] == [
        event["type"]
        for number, event in enumerate(events)
        if number == 0 or events[number - 1]["type"] != event["type"]
    ]
    assert again[-3:] == [event | {"sequence_number": event["sequence_number"] - 1} for event in events[-3:]]
