"""/v1/messages: whole and streamed, with thoughts, calls and their results; counts of tokens; errors as Anthropic has
them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.gateway.anthropic.message import MessageBuilder, MessageSpec
from alignedserve.gateway.generation.call import CallContext, ChoiceDelta, TokenUsage
from alignedserve.gateway.http.keys import digest_of
from alignedserve.gateway.tools.reading import TextReading
from alignedserve.gateway.tools.reasoning import Thinking
from tests.gateway.scripted import MODEL, TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import Served, SharedGateway, play, served
from tests.gateway.tools.test_families import TYPES, cut
from tests.gateway.tools.test_mixtures import MARKS, TEXTS, parts_of
from tests.gateway.tools.test_reasoning import DEEPSEEK
from tests.gateway.tools.test_tools import CALL, TEMPLATE, follows, model_with
from tests.store.redis_process import redis_running

MESSAGES = "/v1/messages"
ASKED: dict[str, Any] = {
    "model": "demo",
    "max_tokens": 100,
    "messages": [{"role": "user", "content": "How far?"}],
}
TOOL = {
    "name": "weather",
    "description": "How it is",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
ROME = '{"city": "Rome"}'
THINKING = {"thinking": {"type": "enabled", "budget_tokens": 1024}}


def events_of(text: str) -> list[dict[str, Any]]:
    found = []
    for block in text.strip().split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        found.append(event)
    return found


def message_of(events: list[dict[str, Any]]) -> dict[str, Any]:
    """What the SDK would make of the events."""
    message: dict[str, Any] = {}
    for event in events:
        match event:
            case {"type": "message_start", "message": begun}:
                message = begun
            case {"type": "content_block_start", "index": index, "content_block": block}:
                assert index == len(message["content"])
                message["content"].append(block | ({"input": ""} if block["type"] == "tool_use" else {}))
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                block = message["content"][index]
                match delta:
                    case {"type": "text_delta", "text": text}:
                        block["text"] += text
                    case {"type": "thinking_delta", "thinking": text}:
                        block["thinking"] += text
                    case {"type": "input_json_delta", "partial_json": text}:
                        block["input"] += text
            case {"type": "message_delta", "delta": delta, "usage": usage}:
                message |= delta
                message["usage"] |= usage
    for block in message["content"]:
        if block["type"] == "tool_use":
            block["input"] = json.loads(block["input"] or "{}")
    assert [event["type"] for event in events][-2:] == ["message_delta", "message_stop"]
    return message


async def ask(at: Any, is_stream: bool, **settings: Any) -> dict[str, Any]:
    response = await at.post(MESSAGES, ASKED | {"stream": is_stream} | settings)
    assert response.status_code == 200, response.text
    return message_of(events_of(response.text)) if is_stream else response.json()


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_message_has_text_usage_and_a_reason(is_stream: bool, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        found = await ask(at, is_stream, system="Be brief.", temperature=0.5)
        assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "demo")
        # No more: the AI SDK's types refuse a null in place of citations.
        assert found["content"] == [{"type": "text", "text": "one two three"}]
        assert (found["stop_reason"], found["stop_sequence"]) == ("end_turn", None)
        prompt = at.router.submitted[0].request.prompt
        messages = [{"role": "system", "content": "Be brief."}, *ASKED["messages"]]
        assert prompt == TOKENIZER.chat_ids(messages)
        assert found["usage"]["input_tokens"] == len(prompt)
        assert found["usage"]["output_tokens"] == len(answer_of("one two three"))
        assert (await ask(at, is_stream, max_tokens=2))["stop_reason"] == "max_tokens"
        found = await ask(at, is_stream, stop_sequences=[" three"])
        assert (found["stop_reason"], found["stop_sequence"]) == ("stop_sequence", " three")
        assert found["content"][0]["text"] == "one two"
        assert found["usage"]["service_tier"] == "standard"
        for asked, named, tier in (("priority", "priority", "rt"), ("flex", "batch", "be")):
            found = await ask(at, is_stream, service_tier=asked)
            assert found["usage"]["service_tier"] == named
            assert at.router.submitted[-1].request.tier == tier

    gateway.play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_text_and_calls_are_blocks(is_stream: bool) -> None:
    async def scenario() -> None:
        said = f"Hm.\n</think>\n\nOne moment.{CALL}"
        async with served(ScriptedRouter(answer=answer_of(said)), model=model_with(DEEPSEEK)) as at:
            found = await ask(at, is_stream, tools=[TOOL], **THINKING)
            thoughts, text, call = found["content"]
            assert (thoughts["type"], thoughts["thinking"]) == ("thinking", "Hm.")
            assert (text["type"], text["text"]) == ("text", "One moment.")
            assert (call["type"], call["name"], call["input"]) == ("tool_use", "weather", {"city": "Rome"})
            assert found["stop_reason"] == "tool_use" and call["id"].startswith("toolu_")
            result = {
                "type": "tool_result",
                "tool_use_id": call["id"],
                "content": [{"type": "text", "text": "mild"}],
            }
            asked = [
                *ASKED["messages"],
                {"role": "assistant", "content": found["content"]},
                {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
            ]
            # who does not ask for thoughts gets none
            found = await ask(at, is_stream, messages=asked, tools=[TOOL])
            assert [block["type"] for block in found["content"]] == ["text", "tool_use"]
            prompt = TOKENIZER.decode(at.router.submitted[1].request.prompt)
            assert "One moment.Rome" in prompt and "tool: mild" in prompt and "And now?" in prompt

    play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("written", "given"),
    [
        ('{"city": Rome}', {"arguments": '{"city": Rome}'}),
        ('{"city": "Rome", "days": }', {"arguments": '{"city": "Rome", "days": }'}),
        ('{"city":  "R\u00f3me", "days": [1, {}]}', {"city": "R\u00f3me", "days": [1, {}]}),
        ("{}", {}),
        ('{"days": 1e999}', {"arguments": '{"days": 1e999}'}),
        ('{"city": "\\ud83d"}', {"arguments": '{"city": "\\ud83d"}'}),
    ],
)
def test_the_arguments_of_a_call_are_an_object_whatever_the_model_writes(
    written: str, given: Any, is_stream: bool, with_tools: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        at.router.answer = answer_of(f"{CALL.replace(ROME, written)}\n{CALL}")
        found = await ask(at, is_stream, tools=[TOOL], max_tokens=500)
        assert [block["input"] for block in found["content"]] == [given, {"city": "Rome"}]

    with_tools.play(scenario)


def blocks_in(reading: TextReading, pieces: list[str], eager_tools: list[str]) -> list[dict[str, Any]]:
    """Returns the blocks of a stream whose text comes in these pieces, without ids."""
    spec = MessageSpec(reading=reading, eagerness=dict.fromkeys(eager_tools, True))
    builder = MessageBuilder(CallContext(MODEL, "default", [[5]], created=0), spec)
    sent: list[Any] = []
    for number, piece in enumerate(pieces, 1):
        delta = ChoiceDelta(0, piece, [30], [], "stop" if number == len(pieces) else None)
        sent += [*(builder.opening(delta, TokenUsage(1, 1)) or ()), builder.events(delta, TokenUsage(1, 1))]
    events = events_of(b"".join([*sent, *builder.end(TokenUsage(1, 1))]).decode())
    found: list[dict[str, Any]] = []
    for event in events:
        match event:
            case {"type": "content_block_start", "content_block": block}:
                found.append({"type": block["type"], "name": block.get("name"), "text": ""})
            case {"type": "content_block_delta", "index": index, "delta": delta}:
                assert index == len(found) - 1
                found[index]["text"] += next(value for key, value in delta.items() if key != "type")
    return found


@pytest.mark.parametrize("thinking", [None, Thinking("<think>", "</think>", True)], ids=["", "thinking"])
@pytest.mark.parametrize("name", sorted(TEXTS))
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_blocks_are_the_same_however_the_text_is_cut(
    name: str, thinking: Thinking | None, data: st.DataObject
) -> None:
    text = "".join(data.draw(st.lists(st.one_of(parts_of(name), st.sampled_from(MARKS)), max_size=8))) or " "
    reading, eager_tools = (
        TextReading(name, types=TYPES, thinking=thinking),
        data.draw(st.sampled_from([[], [*TYPES]])),
    )
    by_letters = blocks_in(reading, list(text), eager_tools)
    assert blocks_in(reading, [text], eager_tools) == by_letters
    if len(text) > 1:
        assert blocks_in(reading, cut(text, data), eager_tools) == by_letters


FINE_GRAINED = "fine-grained-tool-streaming-2025-05-14"


@pytest.mark.parametrize(
    ("betas", "tools", "is_eager"),
    [
        ([], [TOOL], False),
        ([], [TOOL | {"eager_input_streaming": False}], False),
        ([], [TOOL | {"eager_input_streaming": True}], True),
        ([FINE_GRAINED], [TOOL], True),
        (["one-2025-01-01, " + FINE_GRAINED, "other-2025-01-01"], [TOOL], True),
        ([FINE_GRAINED], [TOOL | {"eager_input_streaming": False}], False),
        ([FINE_GRAINED + "0"], [TOOL], False),
        # The model is not told of a tool without a schema: what this one says is not said of a call.
        ([], [{"name": "weather", "type": "x", "eager_input_streaming": True}, TOOL | {"name": "y"}], False),
        ([FINE_GRAINED], [{"name": "weather", "type": "x"}, TOOL | {"name": "y"}], False),
        ([], [TOOL, {"name": "weather", "type": "x", "eager_input_streaming": True}], False),
    ],
)
def test_a_stream_has_arguments_before_their_end_only_of_tools_that_ask_for_it(
    betas: list[str], tools: list[Any], is_eager: bool, with_tools: SharedGateway
) -> None:
    written = '{"city": Rome}'

    async def scenario(at: Served) -> None:
        at.router.answer = answer_of(CALL.replace(ROME, written))
        body = ASKED | {"stream": True, "tools": tools}
        headers = [("anthropic-beta", each) for each in betas]
        response = await at.http.post(MESSAGES, json=body, headers=headers)
        events = events_of(response.text)
        texts = [
            event["delta"]["partial_json"] for event in events if "partial_json" in event.get("delta", {})
        ]
        if is_eager:
            assert len(texts) > 1 and "".join(texts) == written
        else:
            assert list(map(json.loads, texts)) == [{"arguments": written}]
            # The stream is not silent meanwhile: the first one comes with its opening.
            assert len([event for event in events if event["type"] == "ping"]) > 1

    with_tools.play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_that_has_to_be_made_is_a_structured_output(is_stream: bool) -> None:
    async def scenario() -> None:
        said = '{"city": "Rome"}'
        async with served(ScriptedRouter(answer=answer_of(said)), model=model_with(TEMPLATE)) as at:
            found = await ask(at, is_stream, tools=[TOOL], tool_choice={"type": "tool", "name": "weather"})
            (call,) = found["content"]
            assert (call["name"], call["input"]) == ("weather", {"city": "Rome"})
            follows(at.router.submitted[0].request.params.structured_outputs, said)
            await ask(at, is_stream, tools=[TOOL], tool_choice={"type": "none"})
            assert at.router.submitted[1].request.params.structured_outputs is None
            schema = {"type": "object", "properties": {"city": {"type": "string"}}}
            await ask(at, is_stream, output_config={"format": {"type": "json_schema", "schema": schema}})
            follows(at.router.submitted[2].request.params.structured_outputs, said)

    play(scenario)


def test_tokens_are_counted_as_the_prompt_has_them() -> None:
    async def scenario() -> None:
        async with served(model=model_with(TEMPLATE)) as at:
            body = {key: value for key, value in ASKED.items() if key != "max_tokens"} | {"tools": [TOOL]}
            counted = await at.post(f"{MESSAGES}/count_tokens", body)
            await at.post(MESSAGES, ASKED | {"tools": [TOOL]})
            assert counted.json() == {"input_tokens": len(at.router.submitted[0].request.prompt)}

    play(scenario)


@pytest.mark.parametrize("choice", [{"type": "auto"}, {"type": "any"}, {"type": "tool", "name": "weather"}])
def test_tokens_are_counted_however_a_model_writes_its_calls(choice: dict[str, str]) -> None:
    """It has a place for tools, and a call of it that was not asked for would not be known as one."""

    async def scenario() -> None:
        template = TEMPLATE.replace("<tool_call>", "<its_own>").replace("</tool_call>", "</its_own>")
        async with served(model=model_with(template)) as at:
            body = {key: value for key, value in ASKED.items() if key != "max_tokens"} | {"tools": [TOOL]}
            counted = await at.post(f"{MESSAGES}/count_tokens", body | {"tool_choice": choice})
            assert counted.status_code == 200, counted.text
            if choice["type"] != "auto":
                await at.post(MESSAGES, ASKED | {"tools": [TOOL], "tool_choice": choice})
                assert counted.json() == {"input_tokens": len(at.router.submitted[0].request.prompt)}

    play(scenario)


@pytest.mark.parametrize("num_words", [200, 40_000])
def test_tokens_of_a_prompt_that_does_not_fit_are_counted(num_words: int) -> None:
    """The longer one has more letters than any prompt that fits."""

    async def scenario() -> None:
        messages = [{"role": "user", "content": "word " * num_words}]
        async with served(model=replace(MODEL, max_model_len=100)) as at:
            body = {"model": "demo", "messages": messages}
            counted = await at.post(f"{MESSAGES}/count_tokens", body)
            assert counted.json() == {"input_tokens": len(TOKENIZER.chat_ids(messages))}
            refused = await at.post(MESSAGES, body | {"max_tokens": 1})
            assert refused.status_code == 400 and "together may have 100" in refused.text

    play(scenario)


# What clients have sent as a tool's result.
ODD = (True, 1, -1, 1e308, {"type": "text", "text": "x"})


def asked_with_result(content: Any) -> list[dict[str, Any]]:
    result = {"type": "tool_result", "tool_use_id": "x", "content": content}
    return [{"role": "user", "content": [result]}]


@pytest.mark.parametrize("content", ODD)
def test_odd_results_are_not_counted(content: Any, with_tools: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        body = {"model": "demo", "messages": asked_with_result(content)}
        response = await at.post(f"{MESSAGES}/count_tokens", body)
        assert response.status_code == 400 and "must be a string or a list" in response.text

    with_tools.play(scenario)


@pytest.mark.parametrize("content", [None, False, 0, 0.0, "", [], {}])
def test_what_is_nothing_is_an_empty_result(content: Any, with_tools: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        messages = asked_with_result(content)
        for path, body in (
            (MESSAGES, ASKED | {"messages": messages}),
            (f"{MESSAGES}/count_tokens", {"model": "demo", "messages": messages}),
        ):
            response = await at.post(path, body)
            assert response.status_code == 200, response.text
        assert TOKENIZER.decode(at.router.submitted[0].request.prompt).endswith("tool: ")

    with_tools.play(scenario)


@pytest.fixture(scope="module")
def with_tools() -> Iterator[SharedGateway]:
    with SharedGateway.running(model=model_with(TEMPLATE)) as found:
        yield found


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "type 'image'"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": []}]}, "messages"),
        *(({"messages": asked_with_result(content)}, "must be a string or a list") for content in ODD),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tools": [TOOL | {"name": "a b"}]}, "'a b' is not a valid tool name"),
        ({"service_tier": "first"}, "service_tier='first'"),
        ({"mcp_servers": [{"url": "x"}]}, "mcp_servers"),
        ({"temperature": -1}, "temperature=-1"),
    ],
)
def test_errors_are_anthropics(more: dict[str, Any], message: str, with_tools: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        response = await at.post(MESSAGES, ASKED | more)
        body = response.json()
        assert response.status_code == 400 and body["type"] == "error", body
        assert body["error"]["type"] == "invalid_request_error" and message in body["error"]["message"]

    with_tools.play(scenario)


@pytest.mark.slow
def test_errors_of_calls_with_anthropics_header_are_anthropics_too() -> None:
    async def scenario() -> None:
        async with redis_running() as redis, served(store_url=redis.url) as at:
            headers = {"anthropic-version": "2023-06-01"}
            form = {"file": ("x", b"{}")}
            sent = at.http.post("/v1/files", files=form, headers=headers)
            other = at.http.get("/v1/skills", headers=headers)
            for answer, kind, said in (
                (await sent, "invalid_request_error", "files of Anthropic's API do not exist here"),
                (await other, "not_found_error", "not found"),
            ):
                error = answer.json()["error"]
                assert answer.json()["type"] == "error" and error["type"] == kind and said in error["message"]
            plain = await at.http.post("/v1/files", files=form)
            assert plain.json()["error"]["param"] == "purpose"

    play(scenario)


def test_other_errors_have_their_types() -> None:
    async def scenario() -> None:
        async with served() as at:
            response = await at.post(MESSAGES, ASKED | {"model": "else"})
            assert (response.status_code, response.json()["error"]["type"]) == (404, "not_found_error")
            response = await at.http.post(
                MESSAGES, content=b"{", headers={"content-type": "application/json"}
            )
            assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
            response = await at.http.get(MESSAGES)
            assert response.status_code == 405 and response.json()["type"] == "error"
            at.router.allow(1)
            async with at.http.stream("POST", MESSAGES, json=ASKED | {"stream": True}) as stream:
                lines = stream.aiter_lines()
                await anext(lines)
                at.router.fail("it broke")
                rest = [line async for line in lines]
            assert (
                "event: error" in rest
                and json.loads(rest[-2].removeprefix("data: "))["error"]["type"] == "api_error"
            )

    play(scenario)


def test_a_key_comes_in_anthropics_header_or_in_the_usual_one() -> None:
    async def scenario() -> None:
        async with served(key_owners={digest_of("secret"): "a"}) as at:
            for headers in ({"x-api-key": "secret"}, {"authorization": "Bearer secret"}):
                assert (await at.http.post(MESSAGES, json=ASKED, headers=headers)).status_code == 200
            for headers in ({"x-api-key": "other"}, {}):
                response = await at.http.post(MESSAGES, json=ASKED, headers=headers)
                assert (response.status_code, response.json()["error"]["type"]) == (
                    401,
                    "authentication_error",
                )

    play(scenario)


@pytest.mark.parametrize(
    "thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_x"}], ids=str
)
@pytest.mark.parametrize("num_bytes", [100, 100_000])
def test_a_conversation_that_the_server_would_hold_is_refused_as_clients_understand_it(
    thread: Any, num_bytes: int, with_tools: SharedGateway
) -> None:
    """The anthropic package sends the whole conversation after an error with these details, and no other."""

    async def scenario(at: Served) -> None:
        messages = [{"role": "user", "content": "x" * num_bytes}]
        response = await at.post(MESSAGES, ASKED | {"messages": messages, "thread": thread})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["type"] == "invalid_request_error" and "thread" in error["message"]
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        assert at.router.submitted == []

    with_tools.play(scenario)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"context_management": {"edits": [{"type": "compact_20260112"}]}}, "context_management"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9000}}}, "output_config.task_budget"),
    ],
)
def test_what_would_be_another_answer_is_refused(
    fields: dict[str, Any], named: str, with_tools: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
            response = await at.post(path, ASKED | fields)
            assert response.status_code == 400 and named in response.text, response.text
        assert at.router.submitted == []

    with_tools.play(scenario)


def test_a_documents_text_is_read_unless_citations_are_wanted(gateway: SharedGateway) -> None:
    document = {
        "type": "document",
        "source": {"type": "text", "media_type": "text/plain", "data": "It is far."},
    }

    async def scenario(at: Served) -> None:
        for citations in ({}, {"citations": None}, {"citations": {"enabled": False}}):
            await ask(at, False, messages=[{"role": "user", "content": [document | citations]}])
            assert "It is far." in TOKENIZER.decode(at.router.submitted[-1].request.prompt)
        content = [document | {"citations": {"enabled": True}}]
        response = await at.post(MESSAGES, ASKED | {"messages": [{"role": "user", "content": content}]})
        assert response.status_code == 400 and "document with citations" in response.text

    gateway.play(scenario)


def test_what_is_unknown_is_ignored_and_named() -> None:
    async def scenario() -> None:
        async with served() as at:
            body = ASKED | {
                "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
            }
            response = await at.post(MESSAGES, body)
            assert response.status_code == 200, response.text
            assert response.headers["x-ignored-parameters"] == "context_management, tools.web_search_20250305"

    play(scenario)
