"""The stored response is the one that was sent."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.gateway.generation.call import CallContext, ChoiceDelta, TokenUsage
from alignedserve.gateway.openai.choices_builder import Shown
from alignedserve.gateway.openai.completions import ChatSpec
from alignedserve.gateway.openai.responses.builder import ResponsesBuilder, ResponseSpec
from alignedserve.gateway.openai.responses.output import run, spans_without_logprobs
from alignedserve.gateway.openai.responses.replay import SMALL_BYTES, written
from alignedserve.gateway.openai.responses.written import StoredSpan
from alignedserve.gateway.tools.harmony import HarmonyReader
from alignedserve.gateway.tools.readers import CallPiece, Read, ThoughtPiece
from alignedserve.gateway.tools.reading import TextReading
from alignedserve.gateway.tools.reasoning import Thinking
from alignedserve.store import Part, ResponseHead, ResponseId
from tests.gateway.scripted import MODEL
from tests.gateway.tools.test_families import TYPES, cut
from tests.gateway.tools.test_mixtures import MARKS, TEXTS, parts_of

USAGE = TokenUsage(1, 1)


def builder_of(num_logprobs: int | None = None, repeated: bytes = b'{"tools":[]}') -> ResponsesBuilder:
    answering = CallContext(MODEL, "default", [[5]], created=0)
    return ResponseSpec(repeated=repeated, num_logprobs=num_logprobs).builder(answering)


def delta_of(text: str, token: int = 30, finish_reason: str | None = None) -> ChoiceDelta:
    return ChoiceDelta(0, text, [token], [(-0.25, 1, {token: -0.25})], finish_reason)


def events_in(pieces: Iterable[Any]) -> list[dict[str, Any]]:
    text = b"".join(pieces).decode()
    return [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n") if event]


def streamed(builder: ResponsesBuilder, deltas: Sequence[ChoiceDelta]) -> list[dict[str, Any]]:
    pieces: list[Any] = []
    for delta in deltas:
        pieces += builder.opening(delta, USAGE) or ()
        pieces += builder.events(delta, USAGE)
    return events_in([*pieces, *builder.end(USAGE)])


def replayed(builder: ResponsesBuilder) -> list[Any]:
    """What is sent of a response when it is kept, and what is read for it a second time."""
    parts: dict[Part, bytes] = {
        "output": b"".join(builder.output.items),
        "places": builder.output.places,
        "repeated": builder.spec.repeated,
    }
    state = builder.finished(USAGE)
    head = ResponseHead(
        id=ResponseId(builder.id),
        status=state["status"],
        created_at=0,
        expires_at=1,
        num_bytes={name: len(data) for name, data in parts.items()},
        state=json.dumps(state).encode(),
    )

    async def read(part: Part, begin: int, end: int) -> bytes:
        assert end - begin <= SMALL_BYTES
        return parts[part][begin:end]

    async def sent() -> list[Any]:
        pieces = [piece async for event in written(head, read) for piece in event]
        return [
            parts[piece.part][piece.begin : piece.end] if isinstance(piece, StoredSpan) else piece
            for piece in pieces
        ]

    return asyncio.run(sent())


def test_a_response_has_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    builder = builder_of()
    monkeypatch.setattr(time, "time", lambda: 1000.0)
    builder.add(ChoiceDelta(0, "x", [30], [], "stop"))
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


def items_in(
    reading: TextReading, pieces: Sequence[str], shows_reasoning: bool = True
) -> list[dict[str, Any]]:
    """Returns the items of a response whose text comes in these pieces, without their ids."""
    answering = CallContext(MODEL, "default", [[5]], created=0)
    spec = ResponseSpec(repeated=b'{"tools":[]}', reading=reading, shows_reasoning=shows_reasoning)
    builder = spec.builder(answering)
    deltas = [*map(delta_of, pieces[:-1]), delta_of(pieces[-1], finish_reason="stop")]
    events = streamed(builder, deltas)
    items: list[dict[str, Any]] = json.loads(b"[" + b"".join(builder.output.items) + b"]")
    told = {item["id"]: "" for item in items}
    for event in events:
        if event["type"].endswith(".delta"):
            told[event["item_id"]] += event["delta"]
    for item in items:
        written = item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"]
        assert told[item.pop("id")] == written
        item.pop("call_id", None)
    return items


HERMES_REST = ['<tool_call>{"name":"f","arguments":{"a":"x', 'y"}}</tool_call> All done.']
HARMONY_REST = [
    '<|channel|>commentary to=functions.f<|message|>{"a":"x',
    'y"}<|call|><|start|>assistant<|channel|>analysis<|message|>All done.',
]


@pytest.mark.parametrize(
    ("name", "pieces", "last"),
    [
        ("hermes", HERMES_REST, ("message", " All done.")),
        ("harmony", HARMONY_REST, ("reasoning", "All done.")),
        # what ended the call was held until the output ended
        ("hermes", ['<tool_call>{"name":"f","arguments":{"a":"xy"}}</tool_call> All done.<tool_'], None),
    ],
)
def test_the_rest_of_a_call_goes_into_the_call(
    name: str, pieces: list[str], last: tuple[str, str] | None
) -> None:
    call, after = items_in(TextReading(name, types={"f": {}}), pieces)
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a":"xy"}')
    found = after["type"], after["content"][0]["text"]
    assert found == (last or ("message", " All done.<tool_"))


def test_a_calls_id_is_the_models_where_it_has_written_one() -> None:
    """Each is there once."""
    builder = builder_of()
    for call_id in ("functions.f:0", "functions.f:1", None, "functions.f:0"):
        run(builder.output.add(Read([CallPiece("f", "{}", call_id)]), []))
    run(builder.output.end("completed"))
    ids = [item["call_id"] for item in json.loads(b"[" + b"".join(builder.output.items) + b"]")]
    assert ids[:2] == ["functions.f:0", "functions.f:1"] and len({*ids}) == 4
    assert all(call_id.startswith("call_") for call_id in ids[2:])


@pytest.mark.parametrize("thinking", [None, Thinking("<think>", "</think>", True)], ids=["", "thinking"])
@pytest.mark.parametrize("name", sorted(TEXTS))
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_items_are_the_same_however_the_text_is_cut(
    name: str, thinking: Thinking | None, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.one_of(parts_of(name), st.sampled_from(MARKS)), max_size=8))) or " "
    reading, is_shown = TextReading(name, types=TYPES, thinking=thinking), data.draw(st.booleans())
    by_letters = items_in(reading, list(text), is_shown)
    assert items_in(reading, [text], is_shown) == by_letters
    if len(text) > 1:
        assert items_in(reading, cut(text, data), is_shown) == by_letters


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
    assert builder.output.num_bytes == len(b"".join(builder.output.items))
    again = events_in(replayed(builder))
    assert [event["type"] for event in again] == [
        event["type"]
        for number, event in enumerate(events)
        if number == 0 or events[number - 1]["type"] != event["type"]
    ]
    assert again[-3:] == [event | {"sequence_number": event["sequence_number"] - 1} for event in events[-3:]]


def test_what_is_large_is_sent_again_without_being_held() -> None:
    """Text, log-probabilities, what is repeated of the call: `read` above refuses to have one of them in one piece."""
    repeated = b'{"tools":[' + b",".join([b'"x"'] * SMALL_BYTES) + b"]}"
    builder = builder_of(num_logprobs=0, repeated=repeated)
    events = streamed(builder, [*[delta_of("word " * 100)] * 700, delta_of("end", finish_reason="stop")])
    again = events_in(replayed(builder))
    assert [event["type"] for event in again] == list(dict.fromkeys(event["type"] for event in events))
    for found, sent in zip(again[-4:], events[-4:], strict=True):
        assert found == sent | {"sequence_number": found["sequence_number"]}
    assert again[4]["delta"] == events[-4]["text"] and again[4]["logprobs"] == events[-4]["logprobs"]


def test_log_probabilities_are_no_part_of_the_conversation() -> None:
    builder = builder_of(num_logprobs=0)
    thoughts, call = Read([ThoughtPiece("Hm.")]), Read([CallPiece("f", "{}")])
    logprobs = [{"token": "x" * 1000}]
    for read, is_thought in ((thoughts, True), (Read.of("a"), False), (call, False)):
        run(builder.output.add(read, logprobs, is_thought))
    run(builder.output.add(Read.of("b"), logprobs))
    run(builder.output.end("completed"))
    output = b"".join(builder.output.items)
    spans = spans_without_logprobs(builder.output.places, len(output))
    said = b"[" + b"".join(output[begin:end] for begin, end in spans) + b"]"
    items = json.loads(b"[" + output + b"]")
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "message"]
    for item in items:
        for part in item["content"] if item["type"] == "message" else ():
            assert len(part["logprobs"]) == 1
            part["logprobs"] = []
    assert json.loads(said) == items
    assert len(said) - 2 == len(output) - builder.output.num_logprob_bytes < 2000


def test_the_mark_that_thoughts_begin_with_is_no_token_of_the_message() -> None:
    """The first tokens do not say yet what they begin."""
    builder = builder_of(num_logprobs=0)
    builder._reader = HarmonyReader(())
    marks = ["<|channel|>", "analysis", "<|message|>", "Hm.", "<|end|>"]
    texts = [*marks, "<|start|>", "assistant", "<|channel|>", "final", "<|message|>", "Yes"]
    for number, text in enumerate(texts):
        builder.add(delta_of(text, 30 + number))
    builder.add(delta_of("<|return|>", 50, "stop"))
    thoughts, message = json.loads(b"".join(builder.whole(USAGE)))["output"]
    assert (thoughts["content"][0]["text"], message["content"][0]["text"]) == ("Hm.", "Yes")
    tokens = [each["token"] for each in message["content"][0]["logprobs"]]
    assert MODEL.token_text(40) in tokens
    assert not {MODEL.token_text(30 + number) for number in range(len(marks))} & {*tokens}


@pytest.mark.parametrize("shows_reasoning", [True, False])
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_joined_tokens_are_taken_for_what_each_of_them_is(shows_reasoning: bool, data: st.DataObject) -> None:
    """Tokens are joined where they come faster than they are sent: what is counted as thoughts, and whose
    log-probabilities are shown, follows from each."""
    texts = ["<think>", " a", " b", " c", "</think>", "\n", " Hello", " world", "!"]
    reading = TextReading(thinking=Thinking("<think>", "</think>", False))
    by_token = [
        delta_of(text, 30 + number, "stop" if text == "!" else None) for number, text in enumerate(texts)
    ]
    joined, rest = [], [*by_token]
    while rest:
        count = data.draw(st.integers(1, len(rest)))
        some, rest = rest[:count], rest[count:]
        joined.append(
            ChoiceDelta(
                0,
                "".join(each.text for each in some),
                [token for each in some for token in each.token_ids],
                [each.logprobs[0] for each in some],
                some[-1].finish_reason,
                texts=[each.text for each in some] if count > 1 else (),
            )
        )

    def made(deltas: Sequence[ChoiceDelta]) -> tuple[Any, Any]:
        answering = CallContext(MODEL, "default", [[5]], created=0)
        builder = ResponseSpec(
            repeated=b'{"tools":[]}', reading=reading, num_logprobs=1, shows_reasoning=shows_reasoning
        ).builder(answering)
        for delta in deltas:
            builder.add(delta)
        found = json.loads(b"".join(builder.whole(USAGE)))
        message = found["output"][-1]["content"][0]
        return found["usage"]["output_tokens_details"], (message["text"], message["logprobs"])

    def counted(deltas: Sequence[ChoiceDelta]) -> Any:
        spec = ChatSpec(shown=Shown(1), reading=reading, shows_reasoning=shows_reasoning)
        builder = spec.builder(CallContext(MODEL, "default", [[5]], created=0))
        for delta in deltas:
            builder.add(delta)
        return json.loads(b"".join(builder.whole(USAGE)))["usage"]["completion_tokens_details"]

    assert made(joined) == made(by_token) and counted(joined) == counted(by_token)
    assert counted(joined) == {"reasoning_tokens": 4}
