"""Each way in which models write calls: found in the template, read however the text is cut, held by a grammar."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.gateway.tools.bodies import Tool
from alignedserve.gateway.tools.family import Family
from alignedserve.gateway.tools.keyed_readers import types_of
from alignedserve.gateway.tools.pythonic_reader import MAX_CHARS, MAX_PARTS, MAX_PYTHON_CHARS
from alignedserve.gateway.tools.readers import Read
from alignedserve.gateway.tools.reading import FORMATS, TextReading, format_of
from alignedserve.types import InvalidRequest
from tests.gateway.tools.test_tools import follows, tool

TOOLS = [
    tool("weather", city={"type": "string"}, days={"type": "integer"}, exact={"type": "boolean"}, more={}),
    tool("clock"),
]
TYPES = types_of({each["function"]["name"]: each["function"]["parameters"] for each in TOOLS})
TYPES["write"] = {"content": "string", "tags": "array"}
ROME, TWO = {"city": "Rome"}, {"city": "12", "days": 2}

# name, what a template shows, what a model writes, content before and after, calls
CASES: list[tuple[str, str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    (
        "hermes",
        "<tool_call>",
        'Hm.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>',
        "Hm.",
        [("weather", ROME)],
    ),
    (
        "harmony",
        "<|start|><|channel|><|message|>",
        "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary to=functions.weather "
        '<|constrain|>json<|message|>{"city": "Rome"}<|call|>',
        "Hm.",
        [("weather", ROME)],
    ),
    (
        "json-in-text",
        "ipython",
        '{"name": "weather", "parameters": {"city": "Rome"}}',
        "",
        [("weather", ROME)],
    ),
    (
        "mistral-list",
        "[TOOL_CALLS]",
        'Hm.[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock", "arguments": {}}]',
        "Hm.",
        [("weather", ROME), ("clock", {})],
    ),
    (
        "mistral",
        "[TOOL_CALLS]name[ARGS]",
        'Hm.[TOOL_CALLS]weather[ARGS]{"city": "Rome"}[TOOL_CALLS]clock[CALL_ID]a1b2[ARGS] {}',
        "Hm.",
        [("weather", ROME), ("clock", {})],
    ),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>function ```json",
        "Hm.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
        '{"city": "Rome"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n'
        "{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "Hm.",
        [("weather", ROME), ("clock", {})],
    ),
    (
        "deepseek",
        "<｜tool▁call▁begin｜>",
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{"city": "12", "days": 2}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>clock<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        "",
        [("weather", TWO), ("clock", {})],
    ),
    (
        "kimi",
        "<|tool_calls_section_begin|>",
        "Hm.<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
        '{"city": "Rome"}<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}'
        "<|tool_call_end|><|tool_calls_section_end|>",
        "Hm.",
        [("weather", ROME), ("clock", {})],
    ),
    (
        "granite",
        "<|tool_call|>",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}, {"name": "clock", "arguments": {}}]',
        "",
        [("weather", ROME), ("clock", {})],
    ),
    (
        "phi",
        "<|tool|>",
        'Hm. functools[{"name": "weather", "arguments": {"city": "Rome"}}]',
        "Hm. ",
        [("weather", ROME)],
    ),
    (
        "phi",
        "<|tool|>",
        '<|tool_call|>[{"name": "weather", "arguments": {"city": "Rome"}}]<|/tool_call|>Bye',
        "Bye",
        [("weather", ROME)],
    ),
    (
        "hunyuan",
        "<tool_calls>",
        'Hm.<tool_calls>[{"name": "weather", "arguments": {"city": "Rome"}}]</tool_calls>',
        "Hm.",
        [("weather", ROME)],
    ),
    (
        "qwen-coder",
        "<tool_call><function=",
        "Hm.\n<tool_call>\n<function=weather>\n<parameter=city>\n12\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
        "<parameter=exact>\nTrue\n</parameter>\n<parameter=more>\n[1, 2\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=clock>\n</function>\n</tool_call>",
        "Hm.\n",
        [("weather", {"city": "12", "days": 2, "exact": True, "more": "[1, 2"}), ("clock", {})],
    ),
    (
        "glm",
        "<tool_call><arg_key>",
        "Hm.<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>12</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>\n<tool_call>clock\n</tool_call>",
        "Hm.",
        [("weather", TWO), ("clock", {})],
    ),
    (
        "pythonic",
        "[func_name1(params_name1=",
        '[weather(city="12", days=2), clock()]',
        "",
        [("weather", TWO), ("clock", {})],
    ),
]
IDS = [f"{case[0]}-{number}" for number, case in enumerate(CASES)]


def no_token(text: str) -> None:
    return None


def read_all(reading: TextReading, pieces: list[str], is_cut: bool = False) -> Read:
    reader, read = reading.new_reader(), Read()
    for part in [*(reader.feed(piece) for piece in pieces), reader.end(is_cut=is_cut)]:
        read.add(part)
    return read


def cut(text: str, data: st.DataObject) -> list[str]:
    places = sorted(data.draw(st.sets(st.integers(1, max(1, len(text) - 1)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


@pytest.mark.parametrize(("name", "shown", "text", "content", "calls"), CASES, ids=IDS)
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_calls_are_read_however_the_text_is_cut(
    name: str,
    shown: str,
    text: str,
    content: str,
    calls: list[tuple[str, dict[str, Any]]],
    data: st.DataObject,
) -> None:
    assert format_of(f"x {shown} y").name == name
    read = read_all(TextReading(name, types=TYPES), cut(text, data))
    assert [(piece.name, json.loads(piece.arguments)) for piece in read.pieces] == calls
    assert read.content == content


@pytest.mark.parametrize(
    ("name", "text", "ids"),
    [
        (
            "kimi",
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.clock:0<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_call_begin|>functions.clock:1<|tool_call_argument_begin|>{}<|tool_call_end|>"
            "<|tool_call_begin|>clock<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
            ["functions.clock:0", "functions.clock:1", None],
        ),
        ("mistral", "[TOOL_CALLS]clock[CALL_ID]a1b2[ARGS] {}[TOOL_CALLS]clock[ARGS]{}", ["a1b2", None]),
    ],
)
def test_ids_that_a_model_writes_are_the_calls(name: str, text: str, ids: list[str | None]) -> None:
    for pieces in ([text], list(text)):
        read = read_all(TextReading(name, types=TYPES), pieces)
        assert [(piece.name, piece.id, piece.arguments) for piece in read.pieces] == [
            ("clock", each, "{}") for each in ids
        ]


DALLAS = {"city": "Dallas", "days": 2}
FUNCTION = "<function=weather>\n<parameter=city>\nDallas\n</parameter>\n<parameter=days>\n2\n</parameter>\n</function>"
BARE = FUNCTION.replace("\n</parameter>", "")
CLOCK = "<tool_call>\n<function=clock>\n</function>\n</tool_call>"
HERMES = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
LLAMA = '{"name": "clock", "parameters": {}}'
# What models write at times, and other servers read: tags left out, JSON in a string, a call in another family's form.
# name, text, content, calls
SLIPS: list[tuple[str, str, str, list[tuple[str, dict[str, Any]]]]] = [
    ("qwen-coder", f"<tool_call>\n{BARE}\n</tool_call>", "", [("weather", DALLAS)]),
    ("qwen-coder", FUNCTION, "", [("weather", DALLAS)]),
    ("qwen-coder", "Write <function=weather> first. Then <function=clock> and so on.", "", []),
    # No answer can have half of a surrogate pair, nor JSON such a number.
    *(
        (
            "qwen-coder",
            f"<tool_call>\n<function=weather>\n<parameter=more>\n{value}\n</parameter>\n</function>\n</tool_call>",
            "",
            [("weather", {"more": value})],
        )
        for value in ('"\\ud800"', "NaN", "-Infinity", "[1, NaN]")
    ),
    ("qwen-coder", f"Hm. {FUNCTION}\n</tool_call>", "Hm. ", [("weather", DALLAS)]),
    ("qwen-coder", f"{BARE}\n{FUNCTION}\n</tool_call>\nBye", "Bye", [("weather", DALLAS)] * 2),
    ("qwen-coder", f"<tool_call>{FUNCTION}", "", [("weather", DALLAS)]),
    ("qwen-coder", f"<tool_call>{FUNCTION}\n</tool_", "", [("weather", DALLAS)]),
    ("qwen-coder", f"<tool_call>{FUNCTION[:-11]}</tool_call>", "", [("weather", DALLAS)]),
    ("qwen-coder", f"{FUNCTION[:-11]}</tool_call>", "", [("weather", DALLAS)]),
    ("qwen-coder", f"<tool_call>{BARE}\n{FUNCTION}</tool_call>", "", [("weather", DALLAS)] * 2),
    ("qwen-coder", f"<tool_call>{BARE}\n<tool_call>{FUNCTION}</tool_call>", "", [("weather", DALLAS)] * 2),
    ("qwen-coder", '<tool_call>{"name": "clock", "arguments": {}}</tool_call>', "", [("clock", {})]),
    (
        "qwen-coder",
        "<tool_call><function=weather><parameter=city>a </function> b</parameter></function></tool_call>",
        "",
        [("weather", {"city": "a </function> b"})],
    ),
    ("qwen-coder", "<tool_call>\n<function=weather>\n<parameter=city>\nDal", "", []),
    ("qwen-coder", "Say <function= and </function>.", "", []),
    # A value may have tags in it. It ends where it is closed, unless another argument begins before.
    (
        "qwen-coder",
        "<tool_call>\n<function=write>\n<parameter=content>\n<function=a>\n</function>\n<function=b>\n</function>\n"
        "</parameter>\n</function>\n</tool_call>",
        "",
        [("write", {"content": "<function=a>\n</function>\n<function=b>\n</function>"})],
    ),
    (
        "qwen-coder",
        "<function=write>\n<parameter=content>\n<tool_call> </function> </tool_call>\n</parameter>\n</function>",
        "",
        [("write", {"content": "<tool_call> </function> </tool_call>"})],
    ),
    ("qwen-coder", f"<tool_call>{BARE}\nDone.", "Done.", [("weather", DALLAS)]),
    ("qwen-coder", f"<tool_call>{BARE}</tool_call>{CLOCK}", "", [("weather", DALLAS), ("clock", {})]),
    # A call without a mark is of a tool that is known.
    (
        "qwen-coder",
        f"Use `<function=` so: <tool_call>\n{FUNCTION}</tool_call>",
        "Use `<function=` so: ",
        [("weather", DALLAS)],
    ),
    (
        "qwen-coder",
        f"Not <function=NAME>, but {FUNCTION}",
        "Not <function=NAME>, but ",
        [("weather", DALLAS)],
    ),
    ("qwen-coder", "Write <function=NAME>...</function> in docs.", "", []),
    ("qwen-coder", "A <tool_call> is a tag. <tool_call>{", "", []),
    # What closes nothing is no content.
    ("qwen-coder", f"{FUNCTION} \n</tool_call>", "", [("weather", DALLAS)]),
    ("qwen-coder", f"{FUNCTION}\n</tool_", "", [("weather", DALLAS)]),
    (
        "glm",
        "<tool_call>write<arg_key>content</arg_key><arg_value>say <tool_call> now</arg_value></tool_call>",
        "",
        [("write", {"content": "say <tool_call> now"})],
    ),
    (
        "glm",
        "<tool_call>write<arg_key>content</arg_key><arg_value>a</tool_call>b</arg_value></tool_call>",
        "",
        [("write", {"content": "a</tool_call>b"})],
    ),
    # What stands between a key and its value is left out. An argument that can't be read makes the call text.
    *(
        (
            "glm",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>\n"
            f"<arg_key>days</arg_key>{between}<arg_value>2</arg_value>\n</tool_call>",
            "",
            [("weather", {"city": "Rome", "days": 2})],
        )
        for between in ("\n" * 9, " = ", ":", " is > ", "x" * 64)
    ),
    *(
        (
            "glm",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>\n"
            f"<arg_key>days</arg_key>{between}2</arg_value>\n</tool_call>",
            "",
            [],
        )
        for between in ("<arg_value", "<b><arg_value>", "x" * 65 + "<arg_value>", "")
    ),
    (
        "qwen-coder",
        "<tool_call>\n<function=weather>\n<parameter=city>\nDallas\n</parameter>\n<parameter=days\n2\n</parameter>\n"
        "</function>\n</tool_call>",
        "",
        [],
    ),
    (
        "glm",
        "A <tool_call> tag. <tool_call>weather<arg_key>city</arg_key><arg_value>12<tool_call>clock</tool_call>",
        "A <tool_call> tag. ",
        [("weather", {"city": "12"}), ("clock", {})],
    ),
    (
        "glm",
        "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>",
        "",
        [("weather", ROME)],
    ),
    (
        "hermes",
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        "",
        [("weather", ROME)],
    ),
    ("hermes", '<tool_call>{"name": "weather", "arguments": "Rome"}</tool_call>', "", []),
    ("hermes", '<tool_call>{"name": "clock", "arguments": ""}</tool_call>', "", [("clock", {})]),
    ("hermes", f"The <tool_call> tag: {HERMES}", "The <tool_call> tag: ", [("clock", {})]),
    (
        "hermes",
        f'<tool_call>{{"name": "x, "b": {{}}}}</tool_call>{HERMES}',
        '<tool_call>{"name": "x, "b": {}}</tool_call>',
        [("clock", {})],
    ),
    ("hermes", f"{HERMES[:-12]} Bye", "Bye", [("clock", {})]),
    ("hermes", f"{HERMES[:-12]}{HERMES}", "", [("clock", {})] * 2),
    ("phi", f"Use functools.partial. functools[{LLAMA}]", "Use functools.partial. ", [("clock", {})]),
    (
        "mistral-list",
        f"[TOOL_CALLS] is a mark. [TOOL_CALLS][{LLAMA}][TOOL_CALLS][{LLAMA}]",
        "[TOOL_CALLS] is a mark. ",
        [("clock", {})] * 2,
    ),
    ("pythonic", "[1] says so.", "", []),
    # Blanks alone are no content before a call, and are some without one.
    ("hunyuan", ' \n<tool_calls>[{"name": "clock", "arguments": {}}]</tool_calls>', "", [("clock", {})]),
    ("glm", " <tool_call>clock\n</tool_call>", "", [("clock", {})]),
    ("glm", " \n", "", []),
    ("glm", " <tool_call>clock\n</tool_call> bye", " bye", [("clock", {})]),
    ("hermes", f"\n\n{HERMES} Hm", " Hm", [("clock", {})]),
    ("hermes", f"{HERMES} ", "", [("clock", {})]),
    ("hermes", f"{HERMES} \n {HERMES}", "", [("clock", {})] * 2),
    ("glm", "\n Hm. <tool_call>clock\n</tool_call>", "\n Hm. ", [("clock", {})]),
    # gpt-oss goes on after a call.
    (
        "harmony",
        '<|channel|>commentary to=functions.weather <|message|>{"city": "Rome"}<|call|>commentary',
        "",
        [("weather", ROME)],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.weather <|message|>{"city": "Rome"}<|call|>commentary on it',
        "commentary on it",
        [("weather", ROME)],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.weather<|message|>{"city": "Rome"}<|call|>commentary to=functions.clock '
        "<|constrain|>json<|message|>{}",
        "",
        [("weather", ROME), ("clock", {})],
    ),
    (
        "harmony",
        '<|channel|>commentary to=functions.weather <|message|>{"city": "a <|call|> b"}<|call|>',
        "",
        [("weather", {"city": "a <|call|> b"})],
    ),
    *(
        (
            "glm",
            f"<tool_call>write<arg_key>tags</arg_key><arg_value>{value}</arg_value></tool_call>",
            "",
            [("write", {"tags": tags})],
        )
        for value, tags in (
            (r"[{\"id\": \"1\"}, \"a\\\"b\"]", [{"id": "1"}, 'a"b']),
            (r'["a \"b\", c"]', ['a "b", c']),
            (r"[\"a]", r"[\"a]"),
        )
    ),
    # Llama's mark is nobody's text.
    ("json-in-text", f"Let me check. <|python_tag|>{LLAMA}", "Let me check. ", [("clock", {})]),
    ("json-in-text", f"<|python_tag|>{LLAMA}; <|python_tag|>{LLAMA}", "", [("clock", {})] * 2),
    ("json-in-text", 'So: {"name": "clock", "parameters": {}}', "So: ", [("clock", {})]),
    (
        "json-in-text",
        'if {a}: [1] [ {"type": "function", "name": "weather", "parameters": {"city": "Rome"}}, '
        '{"name": "clock", "arguments": {}}]',
        "if {a}: [1] ",
        [("weather", ROME), ("clock", {})],
    ),
    ("json-in-text", 'f() { return {"name": 5}; } [', "", []),
    ("json-in-text", 'So: {"name": "clock", "param', "", []),
    ("json-in-text", f'Like {{"name": "Bob"}}: {LLAMA}', 'Like {"name": "Bob"}: ', [("clock", {})]),
    ("json-in-text", f"Like {{{LLAMA}", "Like {", [("clock", {})]),
    ("json-in-text", f"First {LLAMA} and then {LLAMA}", "First and then ", [("clock", {})] * 2),
    ("json-in-text", f"So {LLAMA} and the list is [1, 2]", "So and the list is [1, 2]", [("clock", {})]),
    ("json-in-text", f"{LLAMA} [1]", "[1]", [("clock", {})]),
    ("json-in-text", 'A call looks like {"name": "NAME", "parameters": {"x": 1}}, as you see.', "", []),
    ("json-in-text", f'{{"name": "Bob"}} {LLAMA}', '{"name": "Bob"} ', [("clock", {})]),
    ("json-in-text", f'{{"a": "{LLAMA}', '{"a": "', [("clock", {})]),
    ("json-in-text", '[{"parameters": {}, "name": "clock"}]', "", [("clock", {})]),
    ("json", 'So: {"name": "clock", "parameters": {}}', "", []),
]


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("<|python_tag|>5 + 5 <|pyth", "5 + 5 <|pyth"),
        ("<|py<|python_tag|>thon_tag|> a", "<|python_tag|> a"),
        ("a <|python_tag|>", "a "),
    ],
)
def test_llamas_mark_is_no_content_where_no_call_follows(text: str, content: str) -> None:
    for pieces in ([text], list(text), *([text[:end], text[end:]] for end in range(1, len(text)))):
        assert read_all(TextReading("json-in-text", types=TYPES), pieces) == Read.of(content)


def refused(constant: str) -> None:
    raise AssertionError(f"{constant} is no JSON")


# Calls with numbers that are too large for a float: JSON has them, but a program that has read them can't write them.
LARGE: list[tuple[str, str, list[str]]] = [
    ("hermes", '<tool_call>{"name": "clock", "arguments": {"a": 1e999}}</tool_call>', ['{"a": 1e999}']),
    ("hermes", '<tool_call>{"arguments": {"a": 1e999}, "name": "clock"}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "clock", "arguments": "{\\"a\\": 1e999}"}</tool_call>', []),
    ("json", '{"parameters": {"a": [-1e999]}, "name": "clock"}', []),
    ("json-in-text", '[{"parameters": {"a": -1E+999}, "name": "clock"}]', []),
    ("mistral-list", '[TOOL_CALLS][{"arguments": {"a": 1e999}, "name": "clock"}]', []),
    ("mistral", '[TOOL_CALLS]clock[ARGS]{"a": 1e999}', ['{"a": 1e999}']),
    ("qwen-coder", FUNCTION.replace("Dallas", "1e999"), ['{"city": "1e999", "days": 2}']),
    ("qwen-coder", FUNCTION.replace("2", "-1e999"), ['{"city": "Dallas", "days": -1e999}']),
    ("glm", "<tool_call>clock<arg_key>a</arg_key><arg_value>[1e999]</arg_value></tool_call>", ['{"a": [1e999]}']),
    ("pythonic", "[clock(a=1e999, b=1)]", ['{"a": 1e999, "b": 1}']),
    ("pythonic", "[clock(a=[1e999, 'x'])]", []),
    ("pythonic", "[clock(a=[NaN])]", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "arguments"), LARGE)
def test_arguments_are_json_whatever_number_a_model_writes(
    name: str, text: str, arguments: list[str]
) -> None:
    for pieces in ([text], list(text)):
        read = read_all(TextReading(name, types=TYPES), pieces)
        assert [piece.arguments for piece in read.pieces] == arguments
        assert arguments or read.content == text
    for each in arguments:
        json.loads(each, parse_constant=refused)


@pytest.mark.parametrize(("name", "text", "content", "calls"), SLIPS)
def test_a_models_slips_are_read_wherever_the_text_is_cut(
    name: str, text: str, content: str, calls: list[tuple[str, dict[str, Any]]]
) -> None:
    """Without a call, all of the text is content."""
    for pieces in ([text], list(text), *([text[:end], text[end:]] for end in range(1, len(text)))):
        read = read_all(TextReading(name, types=TYPES), pieces)
        assert [(piece.name, json.loads(piece.arguments)) for piece in read.pieces] == calls, pieces
        assert read.content == (content if calls else text), pieces


@pytest.mark.parametrize(
    ("name", "text", "call"),
    [
        ("qwen-coder", f"<tool_call>{FUNCTION[:-12]}", ("weather", DALLAS)),
        ("qwen-coder", f"<tool_call>{FUNCTION[:-11]}<", ("weather", DALLAS)),
        ("qwen-coder", f"<tool_call>{BARE}", ("weather", DALLAS)),
        (
            "glm",
            "<tool_call>weather<arg_key>city</arg_key><arg_value>Rome</arg_value>",
            ("weather", ROME),
        ),
    ],
)
def test_a_call_that_is_not_closed_is_one_if_the_model_has_ended_it(
    name: str, text: str, call: tuple[str, dict[str, Any]]
) -> None:
    """Where the output is cut, another argument may have been to come."""
    for pieces in ([text], list(text)):
        read = read_all(TextReading(name, types=TYPES), pieces)
        assert [(piece.name, json.loads(piece.arguments)) for piece in read.pieces] == [call]
        assert read_all(TextReading(name, types=TYPES), pieces, is_cut=True) == Read.of(text)


@pytest.mark.parametrize("name", sorted({case[0] for case in CASES}))
@settings(deadline=None, max_examples=20)
@given(data=st.data())
def test_any_text_is_read_to_its_end(name: str, data: st.DataObject) -> None:
    """Whatever a model writes: no error, and what is no call is shown, whole."""
    marks = [mark for _, shown, text, _, _ in CASES for mark in (shown, text)]
    bits = st.lists(
        st.one_of(st.sampled_from(marks), st.text(max_size=8), st.sampled_from(list("<[{(|'\"]}>)")))
    )
    text = "".join(data.draw(bits))
    whole = read_all(TextReading(name, types=TYPES), [text])
    in_pieces = read_all(TextReading(name, types=TYPES), cut(text, data) if len(text) > 1 else [text])
    assert whole == in_pieces
    if not whole.pieces and name != "harmony":
        assert whole.content == text


def test_every_family_that_a_template_can_show_is_tried() -> None:
    assert {each.name for each in FORMATS} == {case[0] for case in CASES}
    with pytest.raises(InvalidRequest, match="is unknown"):
        format_of("{{ messages }}")


# What a grammar allows of a case's text, where that is not what its schema has.
AS_HELD = {
    "\nTrue\n": "\ntrue\n",
    "<parameter=more>\n[1, 2\n</parameter>\n": "",
    "<|call|>": "",
    # (Its end is the end of the output for the tokenizer here.)
    "<|channel|>commentary<|message|>Hm.<|end|><|start|>assistant": "",
    "<|/tool_call|>Bye": "<|/tool_call|>",
}
HELD = [(name, shown, text) for name, shown, text, _, _ in CASES]


MOST = 1 << 16


def as_held(text: str) -> str:
    for written, held in AS_HELD.items():
        text = text.replace(written, held)
    return text


def strict(*required: str) -> list[Tool]:
    """TOOLS, of which the first one's parameters of these names must be given."""
    functions = [each["function"] | {"strict": True} for each in TOOLS]
    functions[0] |= {"parameters": functions[0]["parameters"] | {"required": list(required)}}
    return [Tool.model_validate({"type": "function", "function": each}) for each in functions]


@pytest.mark.parametrize(("name", "shown", "text"), HELD, ids=IDS)
def test_strict_functions_are_held_by_a_grammar(name: str, shown: str, text: str) -> None:
    family: Family = format_of(shown).family(no_token)
    wanted = family.structure(strict(), False, MOST)
    assert (
        wanted is not None
        and family.structure([Tool.model_validate(each) for each in TOOLS], False, MOST) is None
    )
    follows(wanted, as_held(text))
    if name not in ("json-in-text", "harmony"):
        follows(wanted, "Nothing to call.")
    other_name = as_held(text).replace("city", "town")
    with pytest.raises(AssertionError):
        follows(wanted, other_name)


@pytest.mark.parametrize(("name", "shown", "text"), HELD, ids=IDS)
def test_what_a_schema_asks_for_may_not_be_left_out(name: str, shown: str, text: str) -> None:
    """`exact` is asked for, and no case but one has it."""
    wanted = format_of(shown).family(no_token).structure(strict("exact"), False, MOST)
    assert wanted is not None
    if "exact" in text:
        follows(wanted, as_held(text[: text.rindex("\n<tool_call>")]))
        return
    with pytest.raises(AssertionError):
        follows(wanted, as_held(text))


@pytest.mark.parametrize(("name", "shown", "text"), HELD, ids=IDS)
def test_tools_that_are_not_strict_have_any_arguments_where_one_call_is_allowed(
    name: str, shown: str, text: str
) -> None:
    tools = [Tool.model_validate(each) for each in TOOLS]
    wanted = format_of(shown).family(no_token).structure(tools, True, MOST)
    assert wanted is not None
    num_calls = len(next(case[4] for case in CASES if case[2] == text))
    if num_calls == 1:
        follows(wanted, as_held(text).replace("city", "town"))
        return
    with pytest.raises(AssertionError):
        follows(wanted, as_held(text))


QWEN, GLM, PYTHON = (
    next(case[1] for case in CASES if case[0] == name) for name in ("qwen-coder", "glm", "pythonic")
)


@pytest.mark.parametrize(
    ("shown", "text", "wrong"),
    [
        (
            QWEN,
            "<tool_call>\n<function=f>\n<parameter=unit>\nC\n</parameter>\n<parameter=at>\n[1, {}]\n</parameter>\n"
            "</function>\n</tool_call>",
            "\nK\n",
        ),
        (
            GLM,
            "<tool_call>f\n<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n<arg_key>at</arg_key>\n"
            "<arg_value>[1, {}]</arg_value>\n</tool_call>",
            ">K<",
        ),
        (PYTHON, '[f(unit="C", at=[1, {}])]', '"K"'),
    ],
    ids=["qwen-coder", "glm", "pythonic"],
)
def test_values_that_are_listed_and_those_in_json_are_held(shown: str, text: str, wrong: str) -> None:
    parameters = {
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "at": {"type": "array", "prefixItems": [{"$ref": "#/$defs/n"}]},
        },
        "required": ["unit"],
        "$defs": {"n": {"type": "integer"}},
    }
    function = {"name": "f", "parameters": parameters, "strict": True}
    family = format_of(shown).family(no_token)
    wanted = family.structure([Tool.model_validate({"type": "function", "function": function})], False, MOST)
    assert wanted is not None
    follows(wanted, text)
    other = text.replace(wrong.replace("K", "C"), wrong)
    for changed in (other, text.replace("[1,", "[1.5,"), text.replace("]", "", 1)):
        assert changed != text
        with pytest.raises(AssertionError):
            follows(wanted, changed)


@pytest.mark.parametrize("text", ['[f(a=true, b=[null, false], c="\\ud83d\\ude00")]'])
def test_values_in_json_are_read_within_python(text: str) -> None:
    read = read_all(TextReading("pythonic"), [text])
    assert [json.loads(piece.arguments) for piece in read.pieces] == [
        {"a": True, "b": [None, False], "c": "😀"}
    ]


def listed(number: int, value: str) -> str:
    return f"[f(a=[{', '.join([value] * number)}])]"


@pytest.mark.parametrize(
    ("text", "is_call"),
    [
        # JSON, and texts, may be as long as the list.
        (listed(20000, "1"), True),
        (f"[f(a='{'x' * (MAX_CHARS - 10)}')]", True),
        (f"[f(a='{'x' * MAX_CHARS}')]", False),
        ('[f(a="""it\'s\n""" \'so\', b=r\'\\d\')]', True),
        # What takes more time to parse may not.
        (listed(MAX_PYTHON_CHARS // 10, "'x', 1, None"), False),
        (listed(MAX_PYTHON_CHARS // 20, "'x', 1, None"), True),
        (listed(MAX_PYTHON_CHARS // 2, "''"), False),
        (f"[{', '.join(['f(a=None)'] * 200)}]", False),
        (f"[{', '.join(['f(a=None)'] * 100)}]", True),
        (f"[{', '.join(['f()'] * MAX_PARTS)}]", True),
        (f"[{', '.join(['f()'] * (MAX_PARTS + 1))}]", False),
        (f"[f({', '.join(f'a{n}=1' for n in range(MAX_PARTS))})]", False),
        (f"[{', '.join(['f(a=1)'] * (MAX_PARTS // 2))}]", True),
        (f"[f(a=f'{{[{'1, ' * 1000}]}}')]", False),
        (f"[f(a=rf'{{[{'1, ' * 1000}]}}')]", False),
        # No JSON can have it.
        ("[f(a={[]: 1})]", False),
        ("[f(a={'x'})]", False),
        ("[f(a=)]", False),
        ("[f(a=1, b)]", False),
        ("[f(a='x)]", False),
        ("[f(a='x',), ]", True),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_list_of_calls_is_text_where_it_would_take_long_to_parse(text: str, is_call: bool) -> None:
    read = read_all(TextReading("pythonic"), [text])
    assert bool(read.pieces) == is_call and (is_call or read.content == text)


def test_a_list_that_is_too_long_is_shown_while_it_comes() -> None:
    reader = TextReading("pythonic").new_reader()
    assert reader.feed("[f(a='") == Read()
    assert reader.feed("x" * MAX_CHARS).content == "[f(a='" + "x" * MAX_CHARS
    assert reader.feed("')]").content == "')]"


@pytest.mark.parametrize(("name", "shown", "text"), HELD, ids=IDS)
def test_marks_that_are_tokens_are_held_as_tokens(name: str, shown: str, text: str) -> None:
    """Each mark is one of the vocabulary's tokens here, and not what it looks like."""
    marks = format_of(shown).family(no_token).marks
    tokens = {mark: 360 + number for number, mark in enumerate(marks)}
    wanted = format_of(shown).family(tokens.get).structure(strict(), False, MOST)
    assert wanted is not None
    follows(wanted, as_held(text) if name != "harmony" else text.removesuffix("<|call|>"), tokens)
