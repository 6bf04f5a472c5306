"""The harmony format, as gpt-oss models write it: however the text is cut, whole and streamed, by each API."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers import GenerationConfig, GptOssConfig

from alignedserve.engine.choices import vocabulary_of
from alignedserve.engine.request import Endings
from alignedserve.gateway.tools import harmony
from alignedserve.gateway.tools.harmony import HarmonyReader
from alignedserve.gateway.tools.harmony_turns import turns_of
from alignedserve.gateway.tools.readers import CallPiece, ContentPiece, Read, ThoughtPiece
from alignedserve.gateway.tools.reading import HARMONY_FORMAT
from alignedserve.models.hf_config import load_model_config
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles
from tests.gateway.scripted import EOS, MODEL, TOKENIZER, ScriptedRouter
from tests.gateway.served import QUESTION, Served, play, served
from tests.gateway.tools.test_tools import CLOCK, WEATHER

# gpt-oss's in short: what of it reads a chat's turns.
TEMPLATE = """
{%- if reasoning_effort %}<|start|>system<|message|>Reasoning: {{ reasoning_effort }}<|end|>{% endif %}
{%- for tool in tools or [] %}<|start|>developer<|message|>{{ '// ' + tool.function.description }}<|end|>{% endfor %}
{%- set last = namespace(name=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and 'tool_calls' in message %}
{%- if message.content and message.thinking %}{{ raise_exception('content or thinking, not both') }}{% endif %}
{%- if message.content or message.thinking %}<|start|>assistant<|channel|>analysis<|message|>
{{- message.content or message.thinking }}<|end|>{% endif %}
{%- set last.name = message.tool_calls[0].function.name %}<|start|>assistant to=functions.
{{- last.name }}<|channel|>commentary json<|message|>{{ message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- elif message.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- elif message.role == 'tool' %}
{%- if last.name is none %}{{ raise_exception('no call') }}{% endif %}<|start|>functions.{{ last.name }} to=assistant
{{- '' }}<|channel|>commentary<|message|>{{ message.content | tojson }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""

ROME = '{"city": "Rome"}'
THOUGHT = "<|channel|>analysis<|message|>Hm.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is far."
CALL = f"<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{ROME}"
WEATHER_CALL = [CallPiece("weather", ROME)]

# what a model writes; thoughts, content, calls
CASES: list[tuple[str, str, str, list[CallPiece]]] = [
    (THOUGHT + FINAL, "Hm.", "It is far.", []),
    (f"{THOUGHT}{FINAL}<|return|>", "Hm.", "It is far.", []),
    (FINAL.removeprefix("<|start|>assistant"), "", "It is far.", []),
    (FINAL, "", "It is far.", []),
    (f"{THOUGHT}{CALL}<|call|>", "Hm.", "", WEATHER_CALL),
    # the recipient before the channel, at the beginning and later; types of text without a mark
    (f" to=functions.weather<|channel|>commentary json<|message|>{ROME}<|call|>", "", "", WEATHER_CALL),
    (
        f"{THOUGHT}<|start|>assistant to=functions.weather<|channel|>commentary <|constrain|>json<|message|>{ROME}",
        "Hm.",
        "",
        WEATHER_CALL,
    ),
    (f"<|channel|>commentary to=functions.weather json<|message|>{ROME}", "", "", WEATHER_CALL),
    (f"<|channel|>commentary to=functions.weather<|constrain|>json<|message|>{ROME}", "", "", WEATHER_CALL),
    # a tool without its namespace, a call from thoughts, and a name that nobody offered
    (f"<|channel|>commentary to=weather<|message|>{ROME}", "", "", WEATHER_CALL),
    (f"<|channel|>analysis to=functions.weather<|message|>{ROME}", "", "", WEATHER_CALL),
    ("<|channel|>commentary to=functions.x.y-z<|message|>{}", "", "", [CallPiece("x.y-z", "{}")]),
    # tools of the model's own
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", []),
    ("<|channel|>commentary to=assistant<|message|>rain", "", "rain", []),
    # a preamble, and thoughts between two calls
    (
        f"<|channel|>commentary<|message|>First a look.<|end|>{CALL}<|end|>"
        f"<|start|>assistant{THOUGHT}<|start|>assistant<|channel|>analysis<|message|>So.<|end|>"
        f"<|start|>assistant<|channel|>commentary to=functions.clock<|message|>{{}}<|call|>{FINAL}",
        "Hm.\n\nSo.",
        "First a look.\n\nIt is far.",
        [*WEATHER_CALL, CallPiece("clock", "{}")],
    ),
    ('<|channel|>final <|constrain|>JSON <|message|>{"a": 5}<|return|>', "", '{"a": 5}', []),
    # cut off, everywhere in a header
    (f"{THOUGHT}{FINAL[: len('<|start|>')]}", "Hm.", "", []),
    (f"{THOUGHT}<|start|>assistant", "Hm.", "", []),
    (f"{THOUGHT}<|start|>assistant<|channel|>fin", "Hm.", "", []),
    (f"{THOUGHT}<|start|>assistant<|channel|>commentary to=functions.wea", "Hm.", "", []),
    (f"{THOUGHT}{CALL[:-8]}", "Hm.", "", [CallPiece("weather", ROME[:-8])]),
    (THOUGHT.removesuffix("<|end|>"), "Hm.", "", []),
    ("", "", "", []),
    # no format at all
    ("Hello", "", "Hello", []),
    (" to", "", " to", []),
    ("to=1 or to=2", "", "to=1 or to=2", []),
    (f"It is far.<|end|>{CALL}", "", "It is far.", WEATHER_CALL),
    # an unknown channel, none, another role
    (f"{THOUGHT}<|start|>assistant<|channel|>aside<|message|>So.", "Hm.", "So.", []),
    ("<|message|>So.", "", "So.", []),
    (f"{THOUGHT}<|start|>assistant<|message|>So.", "Hm.", "So.", []),
    (f"{FINAL}<|end|><|start|>user<|message|>And?", "", "It is far.\n\nAnd?", []),
    # marks that are missing
    (f"{THOUGHT}<|start|>assistant<|channel|>final It is far.", "Hm.", " It is far.", []),
    ("<|channel|>analysis\nHm.<|end|>" + FINAL, "\nHm.", "It is far.", []),
    (f"<|channel|>commentary to=functions.weather json{ROME}<|call|>", "", "", WEATHER_CALL),
    (THOUGHT.removesuffix("<|end|>") + FINAL, "Hm.", "It is far.", []),
    (THOUGHT + FINAL.removeprefix("<|start|>assistant"), "Hm.", "It is far.", []),
    (f"{THOUGHT}<|return|>\n<|start|>assistant<|channel|>analysis<|end|>{FINAL}", "Hm.", "It is far.", []),
    # a channel's name without its mark, after a call
    (f"{CALL}<|call|>analysis<|message|>Hm.", "Hm.", "", WEATHER_CALL),
    (f"{CALL}<|call|>\nanalysis<|message|>Hm.<|end|>{FINAL}", "Hm.", "It is far.", WEATHER_CALL),
    (f"{CALL}<|call|>final<|message|>It is far.", "", "It is far.", WEATHER_CALL),
    (f"{CALL}<|call|>commentary<|message|>It is far.", "", "It is far.", WEATHER_CALL),
    (
        f"{CALL}<|call|>commentary to=functions.clock<|message|>{{}}",
        "",
        "",
        [*WEATHER_CALL, CallPiece("clock", "{}")],
    ),
    (f"{CALL}<|call|>analysis<|channel|>final<|message|>It is far.", "", "It is far.", WEATHER_CALL),
    (f"{CALL}<|call|>analysis of it", "", "analysis of it", WEATHER_CALL),
    # marks that are spelt out
    (
        f"{FINAL} <|end|> ends, <|start|> `starts`, <|message|>, <|channel|>final to x, <|x|>, <|e",
        "",
        "It is far. <|end|> ends, <|start|> `starts`, <|message|>, <|channel|>final to x, <|x|>, <|e",
        [],
    ),
    (
        f'{CALL[:-2]} <|constrain|> <|end|>"}}<|call|>',
        "",
        "",
        [CallPiece("weather", ROME[:-2] + ' <|constrain|> <|end|>"}')],
    ),
]


def read_all(pieces: list[str], tools: tuple[str, ...] = ("weather", "clock")) -> Read:
    reader, read = HarmonyReader(tools), Read()
    for part in [*(reader.feed(piece) for piece in pieces), reader.end()]:
        read.add(part)
    return read


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), CASES)
@settings(deadline=None, max_examples=10)
@given(data=st.data())
def test_channels_are_read_however_the_text_is_cut(
    text: str, reasoning: str, content: str, calls: list[CallPiece], data: st.DataObject
) -> None:
    whole = read_all([text])
    assert whole == read_all(list(text)) == read_all(cut(text, data))
    assert (whole.reasoning, whole.content, whole.pieces) == (reasoning, content, calls)


WORDS = st.one_of(
    st.sampled_from(harmony.MARKS),
    st.sampled_from(
        ("assistant", "analysis", "final", "commentary", " to", "=functions.", "weather", "json")
    ),
    st.sampled_from((" ", "\n", "<", "|", ">", "<|", "é", "{")),
    st.text(max_size=8),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=100)
@given(words=st.lists(WORDS, max_size=24), data=st.data())
@example(words=["<|start|>", "a" * 200, "<|message|>"], data=None)
@example(words=["<|channel|>", "a" * 81, "<|message|>"], data=None)
@example(words=["x", "<|end|>", "\n" * 9, "<|start|>"], data=None)
def test_any_text_is_read_to_its_end(words: list[str], data: st.DataObject | None) -> None:
    """Whatever a model writes: no error, nothing that depends on the cuts, and nothing lost that is in no header."""
    text = "".join(words)
    whole = read_all([text])
    assert whole == read_all(list(text)) and (data is None or whole == read_all(cut(text, data)))
    if not any(mark in text for mark in harmony.MARKS):
        assert whole == Read.of(text)
    found = whole.reasoning + whole.content + "".join(piece.arguments for piece in whole.pieces)
    assert all(found.count(letter) == text.count(letter) for letter in "é{")


def test_what_is_said_to_tools_that_nobody_offered_is_text() -> None:
    assert read_all([THOUGHT + CALL], ()) == Read([ThoughtPiece("Hm."), ContentPiece(ROME)])


def test_a_template_shows_the_format() -> None:
    assert HARMONY_FORMAT.is_shown_by(TEMPLATE)
    assert not HARMONY_FORMAT.is_shown_by(TEMPLATE.replace("<|channel|>", "<|im_start|>"))


def test_every_end_token_of_a_checkpoint_ends_an_answer(tmp_path: Path) -> None:
    """`<|return|>` is in config.json, `<|call|>` in generation_config.json alone."""
    GptOssConfig(architectures=["GptOssForCausalLM"], eos_token_id=200002).save_pretrained(tmp_path)
    stops = [200002, 199999, 200012]
    GenerationConfig(eos_token_id=stops).save_pretrained(tmp_path)  # type: ignore[no-untyped-call]
    vocabulary = vocabulary_of(load_model_config(tmp_path))
    suspects = Endings(vocabulary).suspects(np.array([200007, 200002, 200012, 199999, 5]), np.ones(5))
    assert suspects == [1, 2, 3]


# ---- through the gateway ----


def model_of(template: str = TEMPLATE) -> Any:
    """The demo model, with the format's marks in the places of its end token and of those that it does not use."""
    marks = [mark for mark in harmony.MARKS if mark != "<|return|>"]
    text = TOKENIZER.backend.to_str().replace(json.dumps("<|end|>"), json.dumps("<|return|>"))
    for number, mark in enumerate(marks):
        text = text.replace(json.dumps(f"<|reserved_{number}|>"), json.dumps(mark))
    tokenizer = Tokenizer(
        TokenizerFiles(Backend.from_str(text), {"eos_token": "<|return|>"}, {"default": template})
    )
    return replace(MODEL, tokenizer=tokenizer)


HARMONY = model_of()
SAID = f"{THOUGHT}<|start|>assistant<|channel|>commentary<|message|>A look.<|end|>{CALL}"


async def told(at: Served, path: str, body: dict[str, Any]) -> Any:
    response = await at.post(path, body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def said(text: str) -> ScriptedRouter:
    return ScriptedRouter(answer=[*HARMONY.tokenizer.encode(text), EOS])


def chat_of(chunks: list[Any]) -> tuple[str, str, list[tuple[str, str]], str]:
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    calls: list[tuple[str, str]] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", ())):
        if "id" in call:
            calls.append((call["function"]["name"], ""))
        name, arguments = calls[call["index"]]
        calls[call["index"]] = name, arguments + call["function"]["arguments"]
    return (
        "".join((delta.get("reasoning_content") or "") for delta in deltas),
        "".join(delta.get("content", "") for delta in deltas),
        calls,
        chunks[-1]["choices"][0]["finish_reason"],
    )


def test_a_strict_function_is_held_and_messages_may_come_before_it() -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}

    async def scenario() -> None:
        async with served(said(SAID), model=HARMONY) as at:
            await told(at, "/v1/chat/completions", {"messages": QUESTION, "tools": [strict, CLOCK]})
            wanted = at.router.submitted[0].request.params.structured_outputs
        for text, is_held in ((SAID, True), (SAID.replace("city", "town"), False)):
            assert allows(wanted, text.removesuffix("<|call|>")) == is_held
        assert allows(wanted, f"{THOUGHT}<|start|>assistant<|channel|>final<|message|>No call.")

    play(scenario)


def test_what_is_strict_is_no_reason_to_refuse_where_another_format_holds() -> None:
    properties = {f"a{number}": {"type": "integer", "minimum": number} for number in range(2000)}
    function = {"name": "f", "strict": True, "parameters": {"type": "object", "properties": properties}}
    body = {"messages": QUESTION, "tools": [{"type": "function", "function": function}]}

    async def scenario() -> None:
        async with served(said(FINAL), model=HARMONY) as at:
            response = await at.post("/v1/chat/completions", body)
            assert response.status_code == 400 and "grammar has more than" in response.text
            await told(at, "/v1/chat/completions", body | {"response_format": {"type": "json_object"}})

    play(scenario)


def allows(wanted: Any, text: str) -> bool:
    matcher = Grammars(lambda: HARMONY.tokenizer, 384, frozenset([EOS])).matcher(wanted, "")
    output = HARMONY.tokenizer.encode(text)
    return all(matcher.allowed(output[:end])[token] for end, token in enumerate([*output, EOS]))


def test_a_chat_has_thoughts_content_and_calls_apart() -> None:
    async def scenario() -> None:
        asked = {"messages": QUESTION, "tools": [WEATHER, CLOCK]}
        async with served(said(SAID), model=HARMONY) as at:
            done = await told(at, "/v1/chat/completions", asked)
            message, reason = done["choices"][0]["message"], done["choices"][0]["finish_reason"]
            assert (message["reasoning_content"], message["content"], reason) == (
                "Hm.",
                "A look.",
                "tool_calls",
            )
            function = {"name": "weather", "arguments": ROME}
            assert [call["function"] for call in message["tool_calls"]] == [function]
            num_thoughts = done["usage"]["completion_tokens_details"]["reasoning_tokens"]
            assert 0 < num_thoughts <= len(HARMONY.tokenizer.encode("Hm.")) + 1
            found = chat_of(await told(at, "/v1/chat/completions", asked | {"stream": True}))
            assert found == ("Hm.", "A look.", [("weather", ROME)], "tool_calls")
            request = at.router.submitted[0].request
            assert HARMONY.tokenizer.decode(request.prompt, skip_special_tokens=False).endswith(
                "<|start|>assistant"
            )
            # without tools, and with thoughts that are not to be shown
            found = chat_of(await told(at, "/v1/chat/completions", {"messages": QUESTION, "stream": True}))
            assert found == ("Hm.", f"A look.\n\n{ROME}", [], "stop")
            plain = {"messages": QUESTION, "include_reasoning": False}
            message = (await told(at, "/v1/chat/completions", plain))["choices"][0]["message"]
            assert "reasoning_content" not in message and message["content"] == f"A look.\n\n{ROME}"

    play(scenario)


def test_other_apis_have_them_apart_too() -> None:
    async def scenario() -> None:
        async with served(said(SAID), model=HARMONY) as at:
            tool = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}
            response = await told(at, "/v1/responses", {"input": "How far?", "tools": [tool], "store": False})
            assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
            assert response["output"][2]["arguments"] == ROME
            assert response["usage"]["output_tokens_details"]["reasoning_tokens"] > 0
            given = {"name": "weather", "input_schema": WEATHER["function"]["parameters"]}
            asked = {
                "messages": QUESTION,
                "max_tokens": 4000,
                "tools": [given],
                "thinking": {"type": "adaptive"},
            }
            message = await told(at, "/v1/messages", asked)
            assert [block["type"] for block in message["content"]] == ["thinking", "text", "tool_use"]
            assert message["content"][2]["input"] == {"city": "Rome"} and message["stop_reason"] == "tool_use"

    play(scenario)


def test_thoughts_stay_in_the_content_with_their_marks() -> None:
    async def scenario() -> None:
        async with served(said(THOUGHT + FINAL), model=HARMONY) as at:
            asked: dict[str, Any] = {"messages": QUESTION, "separate_reasoning": False}
            done = await told(at, "/v1/chat/completions", asked)
            assert done["choices"][0]["message"]["content"] == THOUGHT + FINAL
            response = await at.post("/v1/chat/completions", asked | {"tools": [CLOCK]})
            assert response.status_code == 400 and "separate_reasoning" in response.json()["error"]["message"]

    play(scenario)


def follows(wanted: Any, text: str) -> None:
    matcher = Grammars(lambda: HARMONY.tokenizer, 384, frozenset([EOS])).matcher(wanted, "")
    output = HARMONY.tokenizer.encode(text)
    for end, token in enumerate([*output, EOS]):
        assert matcher.allowed(output[:end])[token], HARMONY.tokenizer.decode(output[:end])


async def wanted_of(**fields: Any) -> Any:
    async with served(said(THOUGHT + CALL), model=HARMONY) as at:
        await told(at, "/v1/chat/completions", {"messages": QUESTION, **fields})
        return at.router.submitted[0].request.params.structured_outputs


def refuses(wanted: Any, text: str) -> None:
    with pytest.raises(AssertionError):
        follows(wanted, text)


def test_a_structured_output_is_the_final_channels_text() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}

    async def scenario() -> None:
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        for wanted, right, wrong in (
            (await wanted_of(response_format=form), '{"a": 5}', '{"b": 5}'),
            (await wanted_of(structured_outputs={"choice": ["red", "blue"]}), "red", "green"),
        ):
            final = "<|channel|>final<|message|>"
            follows(wanted, final + right)
            follows(wanted, f"{THOUGHT}<|start|>assistant{final}{right}")
            for other in (right, final + wrong, f"{THOUGHT}{right}", f"{THOUGHT}{final}{right}"):
                refuses(wanted, other)

    play(scenario)


def test_a_call_that_has_to_be_made_is_one_in_the_format() -> None:
    async def scenario() -> None:
        tools = [WEATHER, CLOCK]
        call = CALL.removeprefix("<|start|>assistant")
        clock = call.replace("weather", "clock").replace(ROME, "{}")
        wanted = await wanted_of(tools=tools, tool_choice="required")
        for right in (call, THOUGHT + CALL, clock):
            follows(wanted, right)
        for wrong in (call.replace("city", "town"), FINAL, call.replace("weather", "wealth"), call + call):
            refuses(wanted, wrong)
        named = {"type": "function", "function": {"name": "weather"}}
        wanted = await wanted_of(tools=tools, tool_choice=named)
        follows(wanted, call)
        refuses(wanted, clock)
        async with served(said(THOUGHT + CALL), model=HARMONY) as at:
            done = await told(
                at, "/v1/chat/completions", {"messages": QUESTION, "tools": tools, "tool_choice": named}
            )
            assert done["choices"][0]["finish_reason"] == "stop"
            assert done["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"] == ROME
            other = {"type": "function", "function": {"name": "x"}}
            response = await at.post(
                "/v1/chat/completions", {"messages": QUESTION, "tools": tools, "tool_choice": other}
            )
            assert response.status_code == 400 and "is none of the tools" in response.text

    play(scenario)


# ---- what comes back ----


def call_of(call_id: str, name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def test_earlier_turns_are_what_the_template_reads() -> None:
    async def prompt_of(path: str, body: dict[str, Any]) -> str:
        async with served(model=HARMONY) as at:
            await told(at, path, body)
            prompt = at.router.submitted[0].request.prompt
            found: str = HARMONY.tokenizer.decode(prompt, skip_special_tokens=False)
            return found

    async def scenario() -> None:
        made: dict[str, Any] = {"role": "assistant", "content": None, "reasoning_content": "Hm."}
        made["tool_calls"] = [call_of("1", "weather", ROME)]
        messages = [*QUESTION, made, {"role": "tool", "tool_call_id": "1", "content": "rain"}]
        expected = (
            f"<|start|>user<|message|>How far?<|end|><|start|>assistant{THOUGHT}"
            f"<|start|>assistant to=functions.weather<|channel|>commentary json<|message|>{ROME}<|call|>"
            '<|start|>functions.weather to=assistant<|channel|>commentary<|message|>"rain"<|end|>'
            "<|start|>assistant"
        )
        assert await prompt_of("/v1/chat/completions", {"messages": messages}) == expected
        given = [
            {"role": "user", "content": "How far?"},
            {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "Hm."}]},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": ROME},
            {"type": "function_call_output", "call_id": "1", "output": "rain"},
        ]
        assert await prompt_of("/v1/responses", {"input": given, "store": False}) == expected
        # a level that the models do not know, by name or because a client of Anthropic's API does not ask for thoughts
        for path, fields in (
            ("/v1/chat/completions", {"reasoning_effort": "minimal"}),
            ("/v1/messages", {"max_tokens": 5}),
        ):
            text = await prompt_of(path, {"messages": QUESTION, **fields})
            assert text.startswith("<|start|>system<|message|>Reasoning: low<|end|>")
        # a preamble, which the template has no other place for
        made["content"] = "A look."
        text = await prompt_of("/v1/chat/completions", {"messages": messages})
        assert text == expected.replace("Hm.", "Hm.\nA look.")

    play(scenario)


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


def test_each_call_is_a_turn_with_its_results() -> None:
    calls = [call_of("1", "weather"), call_of("2", "clock")]
    turn = {"role": "assistant", "content": "A look.", "tool_calls": calls}
    results = [result("2", "noon"), result("3", "odd"), result("1", "rain")]
    assert turns_of([*QUESTION, turn, *results, *QUESTION]) == [
        *QUESTION,
        turn | {"tool_calls": calls[:1]},
        results[2],
        {"role": "assistant", "tool_calls": calls[1:]},
        results[0],
        results[1],
        *QUESTION,
    ]
    final = {"role": "assistant", "content": "Far.", "tool_calls": [], "reasoning_content": "Hm."}
    assert turns_of([final]) == [
        {"role": "assistant", "content": "Far.", "reasoning_content": "Hm.", "thinking": "Hm."}
    ]
    # instructions, of which the template knows those in the first message
    system, developer = {"role": "system", "content": "a"}, {"role": "developer", "content": "b"}
    assert turns_of([system, developer, *QUESTION, system]) == [
        {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        *QUESTION,
        {"role": "user", "content": "a"},
    ]
    assert turns_of([developer]) == [developer]
    # what no client should send is the template's to refuse
    odd: list[dict[str, Any]] = [
        {"role": "assistant", "tool_calls": ["x", {"id": [5]}]},
        {"role": "tool", "tool_call_id": {}},
    ]
    assert len(turns_of(odd)) == 3
