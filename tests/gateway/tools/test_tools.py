"""Tool calls, with OpenAI's client, whole and streamed."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import openai
import pydantic
import pytest
from tokenizers import Tokenizer as Backend

from alignedserve.gateway.endpoints import ENDPOINTS
from alignedserve.gateway.generation.call import Call
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.tools.bodies import Tool, structure_of
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles
from alignedserve.types import InvalidRequest
from tests.gateway.scripted import EOS, MODEL, TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import QUESTION, play, served

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
MESSAGES: Any = QUESTION
ASKED: dict[str, Any] = {"messages": QUESTION, "tools": [WEATHER, CLOCK]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
LLAMA_CALL = '{"name": "clock", "parameters": {}}'
OTHER = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'


async def ask(said: str, is_stream: bool, template: str = TEMPLATE, **settings: Any) -> tuple[Any, ...]:
    """(content, [(name, arguments)], finish_reason, what was submitted)"""
    async with served(ScriptedRouter(answer=answer_of(said)), model=model_with(template)) as at:
        create: Any = at.client.chat.completions.create
        done = await create(model="demo", **(ASKED | settings), stream=is_stream)
        request = at.router.submitted[0].request
        if not is_stream:
            choice = done.choices[0]
            calls = choice.message.tool_calls or []
            assert len({call.id for call in calls}) == len(calls)
            found = [(call.function.name, call.function.arguments) for call in calls]
            return choice.message.content, found, choice.finish_reason, request
        content, reason = "", None
        named: dict[int, Any] = {}
        async for chunk in done:
            choice = chunk.choices[0]
            content += choice.delta.content or ""
            for call in choice.delta.tool_calls or []:
                if call.index not in named:
                    assert call.id and call.type == "function" and call.index == len(named)
                    named[call.index] = (call.function.name, "")
                else:
                    assert call.id is None and call.function.name is None
                name, arguments = named[call.index]
                named[call.index] = (name, arguments + call.function.arguments)
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


SCHEMA = {"type": "object", "properties": {"far": {"type": "boolean"}}, "required": ["far"]}
NAMED_FORMAT = {"name": "x", "schema": SCHEMA}
# path -> a call that has to be made, beside a format of text
FORCED_AND_FORMATTED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": QUESTION,
        "tools": [CLOCK],
        "tool_choice": "required",
        "response_format": {"type": "json_schema", "json_schema": NAMED_FORMAT},
    },
    "/v1/responses": {
        "input": "How far?",
        "tools": [{"type": "function", **CLOCK["function"]}],
        "tool_choice": "required",
        "text": {"format": {"type": "json_schema", **NAMED_FORMAT}},
    },
    "/v1/messages": {
        "messages": QUESTION,
        "max_tokens": 100,
        "tools": [{"name": "clock", "input_schema": CLOCK["function"]["parameters"]}],
        "tool_choice": {"type": "any"},
        "output_config": {"format": {"type": "json_schema", "schema": SCHEMA}},
    },
}


@pytest.mark.parametrize("path", FORCED_AND_FORMATTED)
def test_a_call_that_has_to_be_made_is_made_beside_a_format_of_text(path: str) -> None:
    async def scenario() -> None:
        said = '[{"name": "clock", "parameters": {}}]'
        async with served(ScriptedRouter(answer=answer_of(said)), model=model_with(TEMPLATE)) as at:
            response = await at.post(path, {"model": "demo"} | FORCED_AND_FORMATTED[path])
            assert response.status_code == 200, response.text
            assert any(kind in response.text for kind in ('"tool_calls"', '"function_call"', '"tool_use"'))
            follows(at.router.submitted[0].request.params.structured_outputs, said)

    play(scenario)


def allowed(mode: str, *names: str) -> Any:
    tools = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": tools}}


def test_only_tools_that_are_allowed_can_be_called() -> None:
    async def scenario() -> None:
        said = '[{"name": "clock", "parameters": {}}]'
        found = await ask(said, False, tool_choice=allowed("required", "clock"))
        assert found[1] == [("clock", "{}")]
        follows(found[3].params.structured_outputs, said)
        with pytest.raises(AssertionError):
            follows(found[3].params.structured_outputs, said.replace("clock", "weather"))
        assert "weather" not in TOKENIZER.decode(found[3].prompt)
        found = await ask(f"Hm. {OTHER}", False, tool_choice=allowed("auto", "clock"))
        assert found[1] == [("clock", "{}")] and found[3].params.structured_outputs is None

    play(scenario)


def test_tokens_of_a_chat_are_counted_with_its_tools() -> None:
    async def scenario() -> None:
        async with served(model=model_with(TEMPLATE + "{{ reasoning_effort }}{{ thinking }}")) as at:
            await at.post("/v1/chat/completions", ASKED)
            counted = (await at.post("/tokenize", ASKED)).json()
            assert counted["tokens"] == list(at.router.submitted[0].request.prompt)
            for more in (
                {"tool_choice": "none"},
                {"tool_choice": allowed("auto", "clock")},
                {"tool_choice": {"type": "function", "function": {"name": "clock"}}},
                {"reasoning_effort": "none"},
                {"reasoning_effort": "high", "chat_template_kwargs": {"thinking": False}},
            ):
                await at.post("/v1/chat/completions", ASKED | more)
                counted = (await at.post("/tokenize", ASKED | more)).json()
                assert counted["tokens"] == list(at.router.submitted[-1].request.prompt), more
            await at.post("/v1/chat/completions", {"messages": QUESTION})
            plain = list(at.router.submitted[-1].request.prompt)
            # without tools there is nothing to choose
            for choice in (
                {},
                {"tool_choice": "auto"},
                {"tool_choice": "required"},
                {"tool_choice": allowed("auto", "x")},
            ):
                for more in ({}, {"tools": []}, {"tools": None}):
                    response = await at.post("/tokenize", {"messages": QUESTION} | choice | more)
                    assert response.json().get("tokens") == plain, response.text
            response = await at.post("/tokenize", ASKED | {"tool_choice": allowed("auto", "x")})
            assert response.status_code == 400 and "is none of the tools" in response.text
            # The last message is the user's.
            response = await at.post("/tokenize", ASKED | {"continue_final_message": True})
            assert (response.status_code, response.json()["error"]["param"]) == (
                400,
                "continue_final_message",
            )
        async with served(model=model_with("{{ messages[0].content }}")) as at:
            response = await at.post("/tokenize", ASKED)
            assert (response.status_code, response.headers["x-ignored-parameters"]) == (200, "tools")

    play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_calls_id_is_the_models_where_it_has_written_one(is_stream: bool) -> None:
    call = "<|tool_call_begin|>functions.clock:7<|tool_call_argument_begin|>{}<|tool_call_end|>"
    said = f"<|tool_calls_section_begin|>{call}{call}<|tool_calls_section_end|>"
    template = TEMPLATE.replace("<tool_call>", "<|tool_calls_section_begin|>")

    async def scenario() -> None:
        async with served(ScriptedRouter(answer=answer_of(said)), model=model_with(template)) as at:
            body = ASKED | {"stream": is_stream}
            text = (await at.post("/v1/chat/completions", {"model": "demo"} | body)).text
            # Each id is there once, also if the model repeats itself.
            assert text.count('"functions.clock:7"') == 1 and text.count('"call_') == 1

    play(scenario)


def test_a_call_is_streamed_while_it_is_written() -> None:
    async def scenario() -> None:
        router = ScriptedRouter(answer=answer_of(CALL))
        ends = range(len(router.answer))
        written = next(
            end for end in ends if TOKENIZER.decode(router.answer[:end]).endswith('"arguments": {"city": "R')
        )
        async with served(router, model=model_with(TEMPLATE)) as at:
            router.allow(written)
            stream: Any = await at.client.chat.completions.create(model="demo", **ASKED, stream=True)
            told: list[Any] = []
            while not told or not told[-1].function.arguments.endswith("R"):
                told += (await anext(stream)).choices[0].delta.tool_calls or []
            assert told[0].id and told[0].function.name == "weather"
            assert "".join(call.function.arguments for call in told) == '{"city": "R'
            router.allow(None)
            rest = [call async for chunk in stream for call in chunk.choices[0].delta.tool_calls or []]
            assert len(rest) > 1 and "".join(call.function.arguments for call in rest) == 'ome"}'

    play(scenario)


def test_openais_client_puts_the_pieces_together() -> None:
    class Weather(pydantic.BaseModel):
        city: str

    offered = openai.pydantic_function_tool(Weather, name="weather")

    async def scenario() -> None:
        said = f"One moment. {CALL}\n{CALL.replace('Rome', 'Oslo')}"
        router = ScriptedRouter(answer=answer_of(said))
        async with served(router, model=model_with(TEMPLATE)) as at:
            stream = at.client.chat.completions.stream
            async with stream(model="demo", messages=MESSAGES, tools=[offered]) as events:
                done = await events.get_final_completion()
            message = done.choices[0].message
            calls = message.tool_calls or []
            assert [call.function.parsed_arguments for call in calls] == [
                Weather(city="Rome"),
                Weather(city="Oslo"),
            ]
            assert (message.content, done.choices[0].finish_reason) == ("One moment. ", "tool_calls")
            assert len({call.id for call in calls}) == 2

    play(scenario)


@pytest.mark.parametrize(
    ("template", "right", "wrong"),
    [
        (
            TEMPLATE,
            ["Hm. " + CALL, f"{CALL}\n{OTHER}", "no call", "", "<tool_ca"],
            [
                CALL.replace('"Rome"', "5"),
                CALL.replace("city", "town"),
                CALL.replace("weather", "wealth"),
                f"{OTHER} {CALL.replace('}', ', }', 1)}",
            ],
        ),
        (
            LLAMA_TEMPLATE,
            [
                '{"name": "weather", "parameters": {"city": "Rome"}}',
                '[{"name": "clock", "parameters": {}}, {"name": "weather", "parameters": {"days": 5}}]',
                " no call",
                "",
            ],
            ['{"name": "weather", "parameters": {"town"', '{"name": "wealth"', '[{"name": "clock"}', "{}"],
        ),
    ],
)
def test_a_strict_function_is_called_as_its_schema_has_it(
    template: str, right: list[str], wrong: list[str]
) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}

    async def scenario() -> None:
        found = await ask(right[0], True, template, tools=[strict, CLOCK])
        assert [name for name, _ in found[1]] == ["weather"] and found[2] == "tool_calls"
        for said in right:
            follows(found[3].params.structured_outputs, said)
        for said in wrong:
            with pytest.raises(AssertionError):
                follows(found[3].params.structured_outputs, said)
        # with another format there is no room for one of calls
        found = await ask("{}", False, template, tools=[strict], response_format={"type": "json_object"})
        assert found[3].params.structured_outputs.kind == "json_object"

    play(scenario)


ANY_TEXT: dict[str, Any] = {"structured_outputs": {"regex": "(.|\n)*"}}
QWEN_CODER_TEMPLATE = TEMPLATE.replace('{"name"', "<function=")


@pytest.mark.slow
@pytest.mark.parametrize("template", [TEMPLATE, LLAMA_TEMPLATE, QWEN_CODER_TEMPLATE])
@pytest.mark.parametrize(
    "other",
    [ANY_TEXT, {"response_format": {"type": "json_object"}}],
    ids=["structured_outputs", "response_format"],
)
def test_what_is_strict_is_no_reason_to_refuse_where_another_format_holds(
    template: str, other: dict[str, Any]
) -> None:
    large = {f"a{number}": {"type": "integer", "minimum": number} for number in range(2000)}
    function = tool("clock", **large)["function"] | {"strict": True}
    body = ASKED | {"tools": [WEATHER, {"type": "function", "function": function}]}
    # The prompt has no room for it.
    model = model_with(template.replace("{{ tool | tojson }}", ""))

    async def scenario() -> None:
        async with served(ScriptedRouter(answer=answer_of("{}")), model=model) as at:
            response = await at.post("/v1/chat/completions", body)
            assert response.status_code == 400 and "grammar has more than" in response.text
            response = await at.post("/v1/chat/completions", body | other)
            assert response.status_code == 200, response.text

    play(scenario)


def test_calls_that_another_format_holds_are_read_like_free_ones() -> None:
    strict = {"type": "function", "function": CLOCK["function"] | {"strict": True}}

    async def scenario() -> None:
        found = await ask(f"Hm. {LLAMA_CALL}", False, LLAMA_TEMPLATE, tools=[strict], extra_body=ANY_TEXT)
        assert found[1] == [("clock", "{}")]

    play(scenario)


TYPES = {"weather": {"city": "string", "days": "integer"}, "clock": {}}


@pytest.mark.parametrize(
    ("shown", "types"),
    [
        ("<function=", TYPES),
        ("<arg_key>", TYPES),
        ("<|python_tag|>", {"weather": {}, "clock": {}}),
        ("<|start|><|channel|><|message|>", {"weather": {}, "clock": {}}),
        ("<tool_call>", {}),
        ("(params_name1=", {}),
        ("[TOOL_CALLS]", {}),
    ],
)
def test_a_reader_gets_of_the_tools_what_it_needs(shown: str, types: dict[str, Any]) -> None:
    model = model_with(shown + "{{ messages[0].content }}{% if tools %}{% endif %}")
    made = ENDPOINTS["/v1/chat/completions"].prepare(json.dumps(ASKED).encode(), model, CallLimits())
    assert isinstance(made, Call) and made.spec.reading.types == types


def test_one_call_at_most_is_one_call() -> None:
    async def scenario() -> None:
        for template, one, two in (
            (TEMPLATE, f"Now: {CALL}", f"{CALL}\n{CALL}"),
            (LLAMA_TEMPLATE, LLAMA_CALL, f"[{LLAMA_CALL}, {LLAMA_CALL}]"),
        ):
            found = await ask(one, False, template, parallel_tool_calls=False)
            assert len(found[1]) == 1
            # its arguments are any object: it is not strict
            follows(found[3].params.structured_outputs, one.replace('"city"', '"town"'))
            with pytest.raises(AssertionError):
                follows(found[3].params.structured_outputs, two)

    play(scenario)


def test_a_strict_schema_that_is_none_is_named() -> None:
    async def scenario() -> None:
        bad = {"type": "function", "function": {"name": "x", "strict": True, "parameters": {"type": "?"}}}
        async with served(model=model_with(TEMPLATE)) as at:
            response = await at.post("/v1/chat/completions", ASKED | {"tools": [bad]})
            assert (response.status_code, response.json()["error"]["param"]) == (400, "tools"), response.text
            # what would be a rule in another kind of grammar is a description here
            odd = {"type": "object", "description": "a ::= b"}
            good = {"type": "function", "function": {"name": "x", "strict": True, "parameters": odd}}
            response = await at.post("/v1/chat/completions", ASKED | {"tools": [good]})
            assert response.status_code == 200, response.text

    play(scenario)


def test_tags_that_are_special_tokens_are_read_all_the_same() -> None:
    spec = json.loads(TOKENIZER.backend.to_str())
    names = [token["content"] for token in spec["added_tokens"] if token["special"] and token["id"] != EOS][
        :2
    ]
    text = json.dumps(spec)
    for old, new in zip(names, ("<tool_call>", "</tool_call>"), strict=True):
        text = text.replace(json.dumps(old), json.dumps(new))
    files = TokenizerFiles(Backend.from_str(text), {"eos_token": "<|end|>"}, {"default": TEMPLATE})
    tokenizer = Tokenizer(files)
    model = replace(MODEL, tokenizer=tokenizer)
    said = [*tokenizer.encode(f"Now: {CALL}"), EOS]
    assert len(said) < len(answer_of(f"Now: {CALL}"))
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}

    async def scenario() -> None:
        async with served(ScriptedRouter(answer=said), model=model) as at:
            response = await at.post("/v1/chat/completions", ASKED | {"tools": [strict]})
            assert response.status_code == 200, response.text
            message = response.json()["choices"][0]["message"]
            assert message["content"] == "Now: "
            assert message["tool_calls"][0]["function"]["arguments"] == '{"city": "Rome"}'
            wanted = at.router.submitted[0].request.params.structured_outputs
            assert wanted
            matcher = Grammars(lambda: tokenizer, 384, frozenset([EOS])).matcher(wanted, "")
            for end, token in enumerate(said):
                assert matcher.allowed(said[:end])[token], tokenizer.decode(said[:end])

    play(scenario)


def follows(wanted: Any, text: str, tokens: Mapping[str, int] = MappingProxyType({})) -> None:
    """`tokens`: those of texts that are one."""
    matcher = Grammars(lambda: TOKENIZER, 384, frozenset([EOS])).matcher(wanted, "")
    parts = re.split(f"({'|'.join(map(re.escape, tokens))})", text) if tokens else [text]
    output = [
        token for part in parts for token in ([tokens[part]] if part in tokens else TOKENIZER.encode(part))
    ]
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

    play(scenario)


ANY_ARGUMENTS = TEMPLATE.replace("call.function.arguments.city", "call.function.arguments.items() | list")


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "[]"),
        (" ", "[]"),
        (None, "[]"),
        ("{}", "[]"),
        ('{"city": "Rome"}', "[('city', 'Rome')]"),
        ('{"city": "Ro', "[('arguments', '{\"city\": \"Ro')]"),
        ('"{\\"city\\": \\"Rome\\"}"', "[('city', 'Rome')]"),
        ('"Rome"', "[('arguments', '\"Rome\"')]"),
        ("[1]", "[('arguments', '[1]')]"),
        ("{" * 20_000, "[('arguments', '{{{"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_call_that_went_wrong_does_not_end_the_conversation(arguments: str | None, shown: str) -> None:
    function = {"name": "weather", "arguments": arguments}
    called = {"role": "assistant", "content": None}
    called["tool_calls"] = [{"id": "1", "type": "function", "function": function}]  # type: ignore[assignment]
    messages = [*QUESTION, called, {"role": "tool", "tool_call_id": "1", "content": "no JSON"}]
    items: Any = [
        *QUESTION,
        {"type": "function_call", "call_id": "1", **function},
        {"type": "function_call_output", "call_id": "1", "output": "no JSON"},
    ]

    async def scenario() -> None:
        model = replace(model_with(ANY_ARGUMENTS), max_model_len=100_000)
        async with served(model=model) as at:
            bodies = {"/v1/chat/completions": {"messages": messages}}
            if arguments is not None:
                bodies["/v1/responses"] = {"input": items}
            for path, body in bodies.items():
                response = await at.post(path, {"model": "demo"} | body)
                assert response.status_code == 200, response.text
                assert shown in TOKENIZER.decode(at.router.submitted[-1].request.prompt)

    play(scenario)


@pytest.mark.parametrize(
    ("template", "fields", "param", "message"),
    [
        (None, {"tool_choice": "required", "stream": True}, "tools", "no place for tools"),
        (TEMPLATE.replace("<tool_call>", ""), {}, "tool_choice", "is unknown"),
        (TEMPLATE, {"tools": None, "tool_choice": "required"}, "tool_choice", "there are no tools"),
        (TEMPLATE, {"tool_choice": allowed("auto", "clock", "x")}, "tool_choice", "is none of the tools"),
        (
            TEMPLATE,
            {"tool_choice": {"type": "function", "function": {"name": "x"}}},
            "tool_choice",
            "is none of the tools, weather, clock",
        ),
        (
            TEMPLATE,
            {"tool_choice": "required", "structured_outputs": {"regex": "a+"}},
            "tool_choice",
            "a required call can't be combined with structured_outputs",
        ),
        (
            TEMPLATE,
            {"tools": [tool("x", y={"type": "?"})], "tool_choice": "required"},
            "tools",
            "Invalid type",
        ),
        (TEMPLATE, {"tools": [tool("x y")]}, "tools", "pattern"),
        (
            TEMPLATE,
            {"tool_choice": "some"},
            "tool_choice",
            "must be none, auto, required, a function by name",
        ),
        (
            TEMPLATE,
            {"tool_choice": {"type": "some"}},
            "tool_choice",
            "must be none, auto, required, a function",
        ),
        (TEMPLATE, {"tool_choice": 5}, "tool_choice", "must be none, auto, required, a function by name"),
        (TEMPLATE, {"tool_choice": {"type": "function"}}, "tool_choice", "function: Field required"),
        (
            TEMPLATE,
            {"tool_choice": {"type": "allowed_tools"}},
            "tool_choice",
            "allowed_tools: Field required",
        ),
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
