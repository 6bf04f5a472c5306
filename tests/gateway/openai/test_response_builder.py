"""What a large answer costs: its size, in steps between which others get their turn."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.gateway.generation.call import CallContext, ChoiceDelta, ResponseBuilder, TokenUsage
from alignedserve.gateway.http import json_pieces
from alignedserve.gateway.http.json_pieces import BLOCK_BYTES, blocks_of, json_response
from alignedserve.gateway.limits import limits
from alignedserve.gateway.openai.choices_builder import Shown
from alignedserve.gateway.openai.completions import (
    ChatResponseBuilder,
    ChatSpec,
    CompletionResponseBuilder,
    CompletionSpec,
)
from alignedserve.gateway.tools.reading import TextReading
from alignedserve.gateway.tools.reasoning import Thinking
from alignedserve.protocol.prompt_logprobs import STEP_TOKENS, TokenLogprobs, pack
from tests.gateway.scripted import MODEL, TOKENIZER, ScriptedRouter
from tests.gateway.served import QUESTION, play, served
from tests.gateway.tools.test_families import TYPES, cut
from tests.gateway.tools.test_mixtures import MARKS, TEXTS, parts_of

LIKELIEST = {token: -0.5 * token for token in range(20, 40)}
FOUND: TokenLogprobs = (-1.5, 4, LIKELIEST)
PROMPT = TOKENIZER.encode("How far is it?") * 100


ANSWERING = CallContext(MODEL, "default", [PROMPT], created=0)


def completion(num_prompt_logprobs: int | None = None, **options: Any) -> CompletionResponseBuilder:
    return CompletionSpec(shown=Shown(20, num_prompt_logprobs), **options).builder(ANSWERING)


def chat(**options: Any) -> ChatResponseBuilder:
    return ChatSpec(shown=Shown(20), **options).builder(ANSWERING)


def fill(builder: ResponseBuilder, num_tokens: int, text: str = "x", packed: bytes = b"") -> ResponseBuilder:
    for number in range(num_tokens):
        reason = "length" if number == num_tokens - 1 else None
        builder.add(ChoiceDelta(0, text, [30], [FOUND], reason, packed))
    return builder


def written(builder: ResponseBuilder) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(b"".join(builder.whole(TokenUsage(1, 1))))
    return body


def chunked(reading: TextReading, pieces: list[str]) -> tuple[str, str, list[list[str]]]:
    """Returns content, thoughts and calls of a stream whose text comes in these pieces, as clients join them."""
    builder = chat(reading=reading)
    content, thoughts, calls = "", "", list[list[str]]()
    for number, piece in enumerate(pieces, 1):
        delta = ChoiceDelta(0, piece, [30], [FOUND], "stop" if number == len(pieces) else None)
        events = builder.events(delta, TokenUsage(1, 1))
        for line in (events if isinstance(events, bytes) else b"".join(events)).splitlines()[::2]:
            new = json.loads(line.removeprefix(b"data: "))["choices"][0]["delta"]
            content, thoughts = content + (new.get("content") or ""), thoughts + (new.get("reasoning") or "")
            for call in new.get("tool_calls", ()):
                if call["index"] == len(calls):
                    calls.append([call["function"]["name"], ""])
                calls[call["index"]][1] += call["function"]["arguments"]
    return content, thoughts, calls


@pytest.mark.parametrize("thinking", [None, Thinking("<think>", "</think>", True)], ids=["", "thinking"])
@pytest.mark.parametrize("name", sorted(TEXTS))
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_chunks_are_joined_to_the_same_however_the_text_is_cut(
    name: str, thinking: Thinking | None, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.one_of(parts_of(name), st.sampled_from(MARKS)), max_size=8))) or " "
    reading = TextReading(name, types=TYPES, thinking=thinking)
    by_letters = chunked(reading, list(text))
    assert chunked(reading, [text]) == by_letters
    if len(text) > 1:
        assert chunked(reading, cut(text, data)) == by_letters


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """By which each piece takes a whole step."""
    ticks = count()
    time = SimpleNamespace(monotonic=lambda: next(ticks) * 2 * json_pieces.STEP_S)
    monkeypatch.setattr(json_pieces, "time", time)
    yield


@pytest.mark.parametrize("make", [completion, chat])
def test_a_token_costs_the_same_however_many_came_before(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []

    def counted(value: Any) -> bytes:
        data = plain(value)
        sizes.append(len(data))
        return data

    plain = json_pieces.encode
    monkeypatch.setattr(json_pieces, "encode", counted)
    builder = fill(make(), 3000)
    body = written(builder)
    logprobs = body["choices"][0]["logprobs"]
    assert {len(column) for column in logprobs.values()} == {3000}
    # nothing is written down twice, and nothing large at once
    assert sum(sizes) < 1.1 * len(json.dumps(body))
    assert max(sizes) < BLOCK_BYTES


def test_an_answer_is_written_down_in_steps(clock: None) -> None:
    """A prompt's log-probabilities in an echo and besides, and an answer's own."""
    packed = pack([FOUND] * (len(PROMPT) - 1))
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def scenario() -> None:
        watching = asyncio.create_task(other())
        builder = fill(
            completion(echoes=["How far is it?" * 100], num_prompt_logprobs=20), 200, packed=packed
        )
        blocks = await blocks_of(builder.whole(TokenUsage(1, 1)))
        assert turns > len(PROMPT) // STEP_TOKENS
        assert max(map(len, blocks)) < 2 * BLOCK_BYTES
        body = json.loads(b"".join(blocks))["choices"][0]
        assert len(body["logprobs"]["tokens"]) == len(PROMPT) + 200 and len(body["prompt_logprobs"]) == len(
            PROMPT
        )
        begun = turns
        sent: list[bytes] = []

        async def send(message: Any) -> None:
            sent.append(message.get("body", b""))

        response = await json_response(builder.whole(TokenUsage(1, 1)))
        await response({"type": "http", "asgi": {"spec_version": "2.4"}}, asyncio.Event().wait, send)  # type: ignore[arg-type]
        assert int(response.headers["content-length"]) == sum(map(len, sent)) == sum(map(len, blocks))
        assert turns - begun > len(blocks)
        watching.cancel()

    play(scenario)


def test_a_stream_has_a_long_prompts_ids_in_pieces() -> None:
    answering = CallContext(MODEL, "default", [PROMPT * 100], created=0)
    for kind in (CompletionSpec, ChatSpec):
        builder = kind(shown=Shown(token_ids=True)).builder(answering)
        delta, usage = ChoiceDelta(0, "x", [30], [], None), TokenUsage(1, 1)
        pieces = [*(builder.opening(delta, usage) or ()), *builder.events(delta, usage)]
        # (Bytes are no pieces.)
        sizes = [len(piece) for piece in pieces if not isinstance(piece, int)]
        assert sum(sizes) > 4 * BLOCK_BYTES and max(sizes) < BLOCK_BYTES, kind
        assert isinstance(builder.events(delta, usage), bytes)


def test_large_answers_are_written_down_one_after_the_other(clock: None) -> None:
    running: list[int] = []

    def pieces(number: int) -> Iterator[bytes]:
        for _ in range(5):
            running.append(number)
            yield b"x"

    async def scenario() -> None:
        await asyncio.gather(*(blocks_of(pieces(number)) for number in range(3)))
        for number in range(3):
            # each has a step at once, in case that is all it takes
            running.remove(number)
        assert running == sorted(running)

    play(scenario)


def test_what_is_impossible_has_a_number() -> None:
    builder = completion()
    builder.add(ChoiceDelta(0, "x", [30], [(-math.inf, 9, {31: -math.inf})], "stop"))
    logprobs = written(builder)["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [-9999.0] and set(logprobs["top_logprobs"][0].values()) == {-9999.0}


def test_calls_are_read_as_they_come() -> None:
    builder = chat(reading=TextReading("hermes"))
    text = 'a<tool_call>{"name": "x", "arguments": {"b": 1}}</tool_call><tool_call>{"arguments": {}, "name": "y"}'
    for letter in text + "</tool_call>":
        builder.add(ChoiceDelta(0, letter, [30], [FOUND], None))
    builder.add(ChoiceDelta(0, "", [30], [FOUND], "stop"))
    (choice,) = written(builder)["choices"]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "a"
    calls = [call["function"] for call in choice["message"]["tool_calls"]]
    assert calls == [{"name": "x", "arguments": '{"b": 1}'}, {"name": "y", "arguments": "{}"}]


def test_an_answers_logprobs_have_a_limit_unless_it_is_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_OUTPUT_LOGPROBS", 4 * 100 * 3)
    body: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "logprobs": 2, "max_tokens": 100}
    talk: dict[str, Any] = {"messages": QUESTION, "n": 4, "logprobs": True, "top_logprobs": 2}

    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            assert (await at.post("/v1/completions", body)).status_code == 200
            for more in (
                {"max_tokens": 101},
                {"prompt": ["x"] * 3},
                {"n": 3},
                {"best_of": 3},
                {"logprobs": 3},
            ):
                response = await at.post("/v1/completions", body | more)
                assert (response.status_code, response.json()["error"]["param"]) == (400, "logprobs")
            assert (
                await at.post("/v1/completions", body | {"max_tokens": 999, "logprobs": None})
            ).status_code == 200
            assert (
                await at.post("/v1/completions", body | {"max_tokens": 999, "stream": True})
            ).status_code == 200
            # who names no length gets what there is room for
            assert (await at.post("/v1/chat/completions", talk)).status_code == 200
            assert at.router.submitted[-1].request.params.max_tokens == 100
            response = await at.post("/v1/chat/completions", talk | {"max_tokens": 101})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "top_logprobs")
            assert (await at.post("/v1/chat/completions", talk | {"min_tokens": 101})).status_code == 400

    play(scenario)
