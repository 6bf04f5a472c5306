"""Tool calls, with OpenAI's client, whole and streamed."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from alignedserve.gateway.tools import HermesReader, JsonReader, NamedReader, Read, Reader, Tool, structure_of
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles
from alignedserve.types import InvalidRequest
from tests.gateway.scripted import EOS, MODEL, TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.test_gateway import QUESTION, play, served

# as Qwen's is, in short
TEMPLATE = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    '<tool_call>{"name": <name>, "arguments": <object>}</tool_call>{% endif %}'
    "{% for message in messages %}{{ message.role }}: {{ message.content }}"
    "{% for call in message.tool_calls or [] %}{{ call.function.arguments.city }}{% endfor %}{% endfor %}"
)
LLAMA_TEMPLATE = TEMPLATE.replace("<tool_call>", "").replace("</tool_call>", "<|python_tag|>")


def model_with(template: str) -> Any:
    files = TokenizerFiles(TOKENIZER.backend, {"eos_token": "<|end|>"}, {"default": template})
    return replace(MODEL, tokenizer=Tokenizer(files))


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


WEATHER = tool("weather", city={"type": "string"}, days={"type": "integer"})
CLOCK = tool("clock")
ASKED: dict[str, Any] = {"messages": QUESTION, "tools": [WEATHER, CLOCK]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


async def ask(said: str, is_stream: bool, template: str = TEMPLATE, **settings: Any) -> tuple[Any, ...]:
    """(content, [(name, arguments)], finish_reason, what was submitted)"""
    async with served(ScriptedRouter(answer=answer_of(said)), model=model_with(template)) as at:
        create: Any = at.client.chat.completions.create
        done = await create(model="demo", **ASKED, **settings, stream=is_stream)
        request = at.router.submitted[0].request
        if not is_stream:
            choice = done.choices[0]
            calls = choice.message.tool_calls or []
            assert len({call.id for call in calls}) == len(calls)
            found = [(call.function.name, call.function.arguments) for call in calls]
            return choice.message.content, found, choice.finish_reason, request
        content, named, reason = "", {}, None
        async for chunk in done:
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                assert call.id and call.type == "function" and call.index == len(named)
                named[call.index] = (call.function.name, call.function.arguments)
            reason = choice.finish_reason or reason
        return content or None, list(named.values()), reason, request


@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_are_found_in_the_text(is_stream: bool) -> None:
    async def scenario() -> None:
        found = await ask(f"One moment. {CALL}\n{OTHER}", is_stream)
        calls = [("weather", '{"city": "Rome"}'), ("clock", "{}")]
        assert found[:3] == ("One moment. ", calls, "tool_calls")
        assert "clock" in TOKENIZER.decode(found[3].prompt) and found[3].params.structured_outputs is None
        assert (await ask("Nothing <tool to call", is_stream))[:3] == ("Nothing <tool to call", [], "stop")
        said = '{"name": "clock", "parameters": {}}'
        assert (await ask(said, is_stream, LLAMA_TEMPLATE))[:3] == (None, [("clock", "{}")], "tool_calls")
        assert (await ask("Hello", is_stream, LLAMA_TEMPLATE))[:3] == ("Hello", [], "stop")
        # what is not to be called is not even offered
        found = await ask(CALL, is_stream, tool_choice="none")
        assert found[:3] == (CALL, [], "stop") and "clock" not in TOKENIZER.decode(found[3].prompt)

    play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_call_that_has_to_be_made_is_a_structured_output(is_stream: bool) -> None:
    async def scenario() -> None:
        said = '[{"name": "weather", "parameters": {"city": "Rome", "days": 2}}]'
        found = await ask(said, is_stream, tool_choice="required")
        assert found[:3] == (None, [("weather", '{"city": "Rome", "days": 2}')], "tool_calls")
        follows(found[3].params.structured_outputs, said)
        named: Any = {"type": "function", "function": {"name": "weather"}}
        said = '{"city": "Rome"}'
        found = await ask(said, is_stream, tool_choice=named)
        assert found[:3] == (None, [("weather", said)], "stop")
        follows(found[3].params.structured_outputs, said)

    play(scenario)


def follows(wanted: Any, text: str) -> None:
    matcher = Grammars(lambda: TOKENIZER, 384, frozenset([EOS])).matcher(wanted)
    output = TOKENIZER.encode(text)
    for end, token in enumerate([*output, EOS]):
        assert matcher.allowed(output[:end])[token], text[:end]


def test_a_call_and_its_result_go_back_through_the_template() -> None:
    async def scenario() -> None:
        call = {
            "id": "1",
            "type": "function",
            "function": {"name": "weather", "arguments": '{"city": "Rome"}'},
        }
        made = {"role": "assistant", "content": None, "tool_calls": [call]}
        messages = [*QUESTION, made, {"role": "tool", "tool_call_id": "1", "content": "rain"}]
        async with served(model=model_with(TEMPLATE)) as at:
            response = await at.post("/v1/chat/completions", ASKED | {"messages": messages})
            assert response.status_code == 200
            text = TOKENIZER.decode(at.router.submitted[0].request.prompt)
            assert "Rome" in text and "tool: rain" in text
            call["function"]["arguments"] = "{"  # type: ignore[index]
            response = await at.post("/v1/chat/completions", ASKED | {"messages": messages})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "messages")

    play(scenario)


@pytest.mark.parametrize(
    ("template", "fields", "param", "message"),
    [
        (None, {}, "tools", "no place for tools"),
        (TEMPLATE.replace("<tool_call>", ""), {}, "tool_choice", "is not known"),
        (TEMPLATE, {"tools": None, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (
            TEMPLATE,
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "is none of the tools, weather, clock",
        ),
        (
            TEMPLATE,
            {"tool_choice": "required", "response_format": {"type": "json_object"}},
            "tool_choice",
            "no room for another format",
        ),
        (
            TEMPLATE,
            {"tools": [tool("x", y={"type": "?"})], "tool_choice": "required"},
            "tools",
            "Invalid type",
        ),
        (TEMPLATE, {"tools": [tool("x y")]}, "tools", "pattern"),
    ],
)
def test_what_cannot_be_called_is_named(
    template: str | None, fields: dict[str, Any], param: str, message: str
) -> None:
    async def scenario() -> None:
        async with served(model=MODEL if template is None else model_with(template)) as at:
            response = await at.post("/v1/chat/completions", ASKED | fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
            assert message in response.json()["error"]["message"]
            assert at.router.submitted == []

    play(scenario)


def read_all(reader: Reader, pieces: list[str]) -> Read:
    read = Read()
    for part in [*(reader.feed(piece) for piece in pieces), reader.end()]:
        read.content += part.content
        read.calls += part.calls
    return read


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HermesReader, f"a{CALL}\n\n{OTHER}b{OTHER}\nc<tool_"),
        (HermesReader, "<tool_call>{broken</tool_call> and <tool_call>{}"),
        (HermesReader, "<<tool_call>[1]</tool_call>"),
        (JsonReader, '  [{"name": "x", "arguments": {}}]'),
        (JsonReader, '{"name": "x"}'),
        (JsonReader, " text"),
        (lambda: NamedReader("x"), '{"a": 1'),
    ],
)
def test_how_the_text_is_cut_makes_no_difference(kind: Any, text: str) -> None:
    whole = read_all(kind(), [text])
    assert read_all(kind(), list(text)) == whole
    if not whole.calls:
        assert whole.content == text


def test_definitions_of_all_tools_are_kept_together() -> None:
    def with_definition(name: str, schema: dict[str, Any]) -> Tool:
        found = tool(name, a={"$ref": "#/$defs/A"})
        found["function"]["parameters"]["$defs"] = {"A": schema}
        return Tool.model_validate(found)

    tools = [with_definition("x", {"type": "integer"}), with_definition("y", {"type": "integer"})]
    wanted = structure_of(tools, "required", one_at_most=True)
    assert wanted is not None and json.loads(wanted.text)["maxItems"] == 1
    follows(wanted, '[{"name": "y", "parameters": {"a": 5}}]')
    with pytest.raises(InvalidRequest, match="tools: two tools define 'A'"):
        structure_of([tools[0], with_definition("y", {"type": "string"})], "required", False)
