"""Thoughts, before the answer: however the text is cut, whole and streamed, beside calls and structured outputs."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.gateway.tools.marked_readers import HermesReader
from alignedserve.gateway.tools.readers import CallPiece, Read, Reader, TextReader, ThoughtPiece
from alignedserve.gateway.tools.reading import TextReading
from alignedserve.gateway.tools.reasoning import MAX_WAIT_CHARS, ReasoningReader, Thinking, thinking_of
from alignedserve.structured_outputs import Thoughts
from tests.gateway.scripted import TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import QUESTION, play, served
from tests.gateway.tools.test_tools import ASKED, CALL, TEMPLATE, follows, model_with

OPENED, FREE = Thinking("<think>", "</think>", True), Thinking("<think>", "</think>", False)
# Qwen3's in short: it strips earlier thoughts, and closes them at once if it is told not to think.
QWEN = (
    TEMPLATE + "{% set shown = (messages[-1].content or '').split('</think>')[-1] %}"
    "{% if enable_thinking is defined and not enable_thinking %}assistant: <think>\n\n</think>\n\n{% endif %}"
)
# DeepSeek-R1's: the prompt opens them.
DEEPSEEK = (
    TEMPLATE + "{% set shown = (messages[-1].content or '').split('</think>')[-1] %}assistant: <think>\n"
)


def read_all(reader: Reader, pieces: list[str], is_cut: bool = False) -> Read:
    read = Read()
    for part in [*(reader.feed(piece) for piece in pieces), reader.end(is_cut=is_cut)]:
        read.add(part)
    return read


CASES = [
    (OPENED, TextReader, "\nLet me see.\n</think>\n\nIt is far.", "Let me see.", "It is far.", []),
    (OPENED, TextReader, "no end </thin", "no end </thin", "", []),
    # The mark is no thought, however often it stands before them.
    (OPENED, TextReader, "<think>\nLet me see.</think>far", "Let me see.", "far", []),
    (OPENED, TextReader, " \n<think> <think>a <think> b</think>far", "a <think> b", "far", []),
    (OPENED, TextReader, "<think></think>far", "", "far", []),
    (OPENED, TextReader, "<thin", "<thin", "", []),
    (FREE, TextReader, "<think><think>a</think>far", "a", "far", []),
    (OPENED, TextReader, "</think>far", "", "far", []),
    (FREE, TextReader, "\n<think>\na < b </think> far </think>", "a < b", "far </think>", []),
    (FREE, TextReader, "It is far <think>.</think>", "", "It is far <think>.</think>", []),
    (FREE, TextReader, " <thin", "", " <thin", []),
    (FREE, TextReader, "<think></think>\n\n", "", "", []),
    (
        FREE,
        HermesReader,
        f"<think>a {CALL}\n</think>\nb{CALL}",
        f"a {CALL}",
        "b",
        [CallPiece("weather", '{"city": "Rome"}')],
    ),
    # Thoughts that nothing closes end where a call begins; a draft of a call is none.
    (OPENED, HermesReader, f"I call.\n{CALL}", "I call.", "", [CallPiece("weather", '{"city": "Rome"}')]),
    (FREE, HermesReader, f"<think>{CALL}\n{CALL}", "", "", [CallPiece("weather", '{"city": "Rome"}')] * 2),
    (OPENED, HermesReader, "a <tool_call> b", "a <tool_call> b", "", []),
    # What else there is are thoughts.
    (
        OPENED,
        HermesReader,
        f"the <tool_call> tag.\n{CALL} Hm, rather\n{CALL} so.",
        "the <tool_call> tag.\n Hm, rather\n so.",
        "",
        [CallPiece("weather", '{"city": "Rome"}')] * 2,
    ),
    (OPENED, HermesReader, "a <tool_call> b\n </think> c", "a <tool_call> b", "c", []),
    (OPENED, HermesReader, "a <tool_c </thi", "a <tool_c </thi", "", []),
    (OPENED, TextReader, f"a {CALL}", f"a {CALL}", "", []),
]
KIMI_CALL = (
    "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    '{"city": "Rome"}<|tool_call_end|><|tool_calls_section_end|>'
)
FUNCTION = "<function=weather>\n<parameter=city>\nRome\n</parameter>\n</function>"


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("hermes", CALL),
        ("qwen-coder", f"<tool_call>\n{FUNCTION}\n</tool_call>"),
        ("qwen-coder", FUNCTION),
        ("glm", "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"),
        ("kimi", KIMI_CALL),
        ("hunyuan", '<tool_calls>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_calls>'),
    ],
)
def test_thoughts_that_nothing_closes_end_where_a_call_of_any_family_begins(name: str, call: str) -> None:
    reading = TextReading(name, types={"weather": {"city": "string"}}, thinking=OPENED)
    for text, reasoning in (
        (f"I call.\n{call}", "I call."),
        (f"Hm {call} no.\n</think>\n{call}", f"Hm {call} no."),
    ):
        for end in range(len(text)):
            read = read_all(reading.new_reader(), [text[:end], text[end:]])
            assert (read.reasoning, read.content) == (reasoning, ""), end
            assert [(each.name, each.arguments) for each in read.pieces] == [("weather", '{"city": "Rome"}')]


# A call with a text in it, for each way in which texts are written.
WRITING = {
    "hermes": '<tool_call>{"name": "weather", "arguments": {"city": "TEXT"}}</tool_call>',
    "qwen-coder": FUNCTION.replace("\nRome\n", "TEXT"),
    "glm": "<tool_call>weather<arg_key>city</arg_key><arg_value>TEXT</arg_value></tool_call>",
    "kimi": KIMI_CALL.replace("Rome", "TEXT"),
    "granite": '<|tool_call|>[{"arguments": {"city": "TEXT"}, "name": "weather"}]',
}
ONE_LINE = ["hermes", "kimi", "granite"]


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize(
    "text",
    ["</think>", "a </think> b", "</think></think>", "</think>" + "x" * (MAX_WAIT_CHARS // 2) + "</think>"],
    ids=len,
)
def test_a_tag_in_a_text_within_a_call_closes_no_thoughts(name: str, text: str) -> None:
    reading = TextReading(name, types={"weather": {"city": "string"}}, thinking=OPENED)
    call = WRITING[name].replace("TEXT", text)
    for said, reasoning, content in (
        (f"I call. {call}", "I call.", ""),
        (f"Hm {call} no.</think>So.{call}", f"Hm {call} no.", "So."),
    ):
        for pieces in ([said], list(said), [said[:40], said[40:]]):
            read = read_all(reading.new_reader(), pieces)
            assert (read.reasoning, read.content) == (reasoning, content)
            assert [(each.name, json.loads(each.arguments)) for each in read.pieces] == [
                ("weather", {"city": text})
            ]


@pytest.mark.parametrize("name", WRITING)
@pytest.mark.parametrize(
    "answer",
    [
        "It is far.",
        "\n\nIt is far.",
        'He says "no" and goes.',
        f"It is far{' and far' * 200}.",
        '{"a": "b',
        "So I say \\",
    ],
    ids=lambda answer: answer[:10],
)
def test_a_tag_closes_thoughts_where_a_call_in_them_is_left(name: str, answer: str) -> None:
    reading = TextReading(name, types={"weather": {"city": "string"}}, thinking=OPENED)
    begun = "Hm. " + WRITING[name].split("TEXT")[0] + "Ro"
    for call in ("", WRITING[name].replace("TEXT", "Bari")):
        said = f"{begun}</think>{answer}{call}"
        for pieces in ([said], list(said), [said[:-3], said[-3:]]):
            read = read_all(reading.new_reader(), pieces)
            assert (read.reasoning, read.content) == (begun, answer.lstrip())
            assert [each.name for each in read.pieces] == ["weather"] * bool(call)


@pytest.mark.parametrize("name", WRITING)
def test_an_answer_after_a_call_that_is_left_is_not_held_for_long(name: str) -> None:
    reader = TextReading(name, types={"weather": {"city": "string"}}, thinking=OPENED).new_reader()
    reader.feed(WRITING[name].split("TEXT")[0] + "Ro</think>")
    if name in ONE_LINE:
        assert reader.feed("\n\nSo").content == "So"
        return
    assert reader.feed("\n\nSo").content == ""
    assert reader.feed("x" * MAX_WAIT_CHARS).content.startswith("Sox")


@pytest.mark.parametrize(("thinking", "kind", "text", "reasoning", "content", "calls"), CASES)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_thoughts_are_found_however_the_text_is_cut(
    thinking: Thinking,
    kind: type[Reader],
    text: str,
    reasoning: str,
    content: str,
    calls: list[CallPiece],
    data: st.DataObject,
) -> None:
    places = sorted(data.draw(st.sets(st.integers(1, len(text) - 1), max_size=12)))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    read = read_all(ReasoningReader(thinking, kind), pieces)
    assert (read.reasoning, read.content, read.pieces) == (reasoning, content, calls)


@pytest.mark.parametrize(
    "text",
    [
        f"I could {CALL} but that would be wrong, because",
        f"I could {CALL}",
        'So <tool_call>{"name": "write", "arguments": {"content": "abc',
    ],
)
def test_in_thoughts_that_are_cut_a_call_is_a_draft(text: str) -> None:
    for pieces in ([text], list(text)):
        assert read_all(ReasoningReader(OPENED, HermesReader), pieces, is_cut=True) == Read(
            [ThoughtPiece(text)]
        )


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "What <tool_call> tags, <tool_call>[1] and <tool_call>{x} are: "),
        ("phi", "functools and functools[0] are: "),
        ("kimi", "<|tool_call_begin|> is a mark: "),
        ("qwen-coder", "<function= is one, and <function=NAME>, and <tool_call><b>: "),
        ("glm", "<tool_call>weather is one: "),
    ],
)
def test_thoughts_are_shown_while_they_come_where_no_call_can_begin(name: str, text: str) -> None:
    reader = TextReading(name, thinking=OPENED).new_reader()
    shown = ""
    for letter in text + "word ":
        shown += reader.feed(letter).reasoning
    assert shown == text + "word"
    for _ in range(200):
        assert reader.feed(" on").reasoning.strip() == "on"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_limit_that_ends_thoughts_ends_no_draft_of_a_call(is_stream: bool) -> None:
    async def scenario() -> None:
        said = f"I could {CALL} but"
        answer = answer_of(said)[:-1]
        found = await ask(said, is_stream, DEEPSEEK, tools=ASKED["tools"], max_tokens=len(answer))
        assert (found[0], found[1] or None, found[2]) == (said, None, [])

    play(scenario)


def test_the_end_of_the_prompt_says_whether_thoughts_are_open() -> None:
    template = "{{ content.split('</think>')[-1] }}"
    assert thinking_of(template, "assistant\n<think>\n") == OPENED
    assert thinking_of(template, "what is <think>?\nassistant\n") == FREE
    assert thinking_of(template, "assistant\n<think>\n\n</think>\n\n") is None
    assert thinking_of("{{ messages }}", "<think>") is None


async def ask(said: str, is_stream: bool, template: str, **settings: Any) -> tuple[Any, ...]:
    """(thoughts, content, calls, usage, what was submitted)"""
    async with served(ScriptedRouter(answer=answer_of(said)), model=model_with(template)) as at:
        body = {"messages": QUESTION, "stream": is_stream} | settings
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        response = await at.post("/v1/chat/completions", body)
        assert response.status_code == 200, response.text
        request = at.router.submitted[0].request
        if not is_stream:
            done = response.json()
            message = done["choices"][0]["message"]
            calls = [call["function"]["name"] for call in message.get("tool_calls", [])]
            return message.get("reasoning_content"), message["content"], calls, done["usage"], request
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines]
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
        thoughts = "".join((delta.get("reasoning_content") or "") for delta in deltas)
        content = "".join(delta.get("content") or "" for delta in deltas)
        calls = [
            call["function"]["name"]
            for delta in deltas
            for call in delta.get("tool_calls", [])
            if "id" in call
        ]
        return thoughts or None, content or None, calls, chunks[-1]["usage"], request


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_come_apart_from_the_answer(is_stream: bool) -> None:
    async def scenario() -> None:
        said = "<think>\none two\n</think>\n\nthree"
        found = await ask(said, is_stream, QWEN)
        assert found[:3] == ("one two", "three", [])
        num_thoughts = found[3]["completion_tokens_details"]["reasoning_tokens"]
        assert 0 < num_thoughts < found[3]["completion_tokens"]
        assert (await ask("one two</think>three", is_stream, DEEPSEEK))[:2] == ("one two", "three")
        # a model that does not think, and one that is told not to
        found = await ask(said, is_stream, TEMPLATE)
        assert found[:2] == (None, said) and "completion_tokens_details" not in found[3]
        found = await ask("three", is_stream, QWEN, reasoning_effort="none")
        assert found[:2] == (None, "three") and TOKENIZER.decode(found[4].prompt).endswith("</think>\n\n")
        found = await ask("three", is_stream, QWEN, chat_template_kwargs={"enable_thinking": False})
        assert found[:2] == (None, "three")

    play(scenario)


def test_thoughts_have_both_names_and_are_null_without_any() -> None:
    async def scenario() -> None:
        said = "<think>one</think>three"
        async with served(ScriptedRouter(answer=answer_of(said)), model=model_with(QWEN)) as at:
            response = await at.post("/v1/chat/completions", {"messages": QUESTION})
            message = response.json()["choices"][0]["message"]
            assert (message["reasoning_content"], message["reasoning"]) == ("one", "one")
            options = {"include_usage": True, "continuous_usage_stats": True}
            body = {"messages": QUESTION, "stream": True, "stream_options": options}
            lines = (await at.post("/v1/chat/completions", body)).text.splitlines()
            chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
            assert all(delta["reasoning_content"] == delta["reasoning"] for delta in deltas)
            # Only the first and the last show nothing: while a tag is spelt, there is no event.
            assert all(any(delta.values()) for delta in deltas[:-1])
            assert deltas[0]["reasoning"] is None and chunks[0]["usage"]["completion_tokens"] == 0
            body |= {"include_reasoning": False}
            assert "reasoning" not in (await at.post("/v1/chat/completions", body)).text.replace(
                "reasoning_tok", ""
            )
        async with served(model=model_with(TEMPLATE)) as at:
            message = (await at.post("/v1/chat/completions", {"messages": QUESTION})).json()["choices"][0][
                "message"
            ]
            assert "reasoning" not in message and "reasoning_content" not in message

    play(scenario)


@pytest.mark.parametrize("sent", ["reasoning", "reasoning_content"])
@pytest.mark.parametrize("read", ["reasoning", "reasoning_content"])
def test_earlier_thoughts_reach_the_template_by_either_name(sent: str, read: str) -> None:
    template = "{% for m in messages %}{{ m.content }}{{ m." + read + " }}{% endfor %}"
    messages = [*QUESTION, {"role": "assistant", "content": "Far.", sent: "I guess"}, *QUESTION]

    async def scenario() -> None:
        async with served(model=model_with(template)) as at:
            await at.post("/v1/chat/completions", {"messages": messages})
            prompt = at.router.submitted[0].request.prompt
            assert "I guess" in TOKENIZER.decode(prompt)
            counted = (await at.post("/tokenize", {"messages": messages})).json()
            assert counted["tokens"] == list(prompt)

    play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_says_where_thoughts_go(is_stream: bool) -> None:
    async def scenario() -> None:
        said = "<think>one</think>three"
        found = await ask(said, is_stream, QWEN, include_reasoning=False)
        assert found[:2] == (None, "three")
        assert (await ask(said, is_stream, QWEN, separate_reasoning=False))[:2] == (None, said)

    play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
def test_calls_come_after_thoughts(is_stream: bool) -> None:
    async def scenario() -> None:
        found = await ask(f"a {CALL}</think>b{CALL}", is_stream, DEEPSEEK, tools=ASKED["tools"])
        assert found[:3] == (f"a {CALL}", "b", ["weather"])

    play(scenario)


def test_a_structured_output_comes_after_thoughts() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}

    async def scenario() -> None:
        said = 'I see {no} JSON.\n</think>\n\n{"a": 5}'
        found = await ask(said, False, DEEPSEEK, **asked)
        assert found[:2] == ("I see {no} JSON.", '{"a": 5}')
        wanted = found[4].params.structured_outputs
        assert wanted.thoughts == Thoughts("</think>") and wanted.kind == "json"
        follows(wanted, said)
        said = '{"a": 5}'
        wanted = (await ask(said, False, QWEN, **asked))[4].params.structured_outputs
        assert wanted.thoughts == Thoughts("</think>", "<think>")
        follows(wanted, said)
        follows(wanted, f"<think>Hm.</think>{said}")
        wanted = (await ask(said, False, QWEN, **asked, reasoning_effort="none"))[4].params.structured_outputs
        assert wanted.thoughts is None
        # a call that has to be made
        said = '[{"name": "clock", "parameters": {}}]'
        more = {"tools": ASKED["tools"], "tool_choice": "required"}
        found = await ask(f"Hm.</think>{said}", False, DEEPSEEK, **more)
        assert found[:3] == ("Hm.", None, ["clock"])
        follows(found[4].params.structured_outputs, f"Hm.</think>{said}")

    play(scenario)
