"""What the grammars of strict calls allow and forbid, in each family's format."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.gateway.tools import keyed_grammar, schemas
from alignedserve.gateway.tools.bodies import Tool
from alignedserve.gateway.tools.keyed_readers import types_of
from alignedserve.gateway.tools.reading import TextReading, format_of
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest
from tests.gateway.tools.test_families import CASES, MOST, no_token, read_all
from tests.gateway.tools.test_tools import follows

SHOWN = {name: shown for name, shown, _, _, _ in CASES} | {
    "deepseek": "<｜tool▁call▁begin｜>function ```json",
    "deepseek-v3.1": "<｜tool▁call▁begin｜>",
}
KEYED = ("qwen-coder", "glm", "pythonic")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def grammar(
    family: str,
    parameters: Mapping[str, Any] = MappingProxyType(CITY),
    name: str = "f",
    tokens: Mapping[str, int] = MappingProxyType({}),
    one_at_most: bool = False,
    max_bytes: int = MOST,
) -> StructuredOutputsParams:
    function = {"name": name, "parameters": dict(parameters), "strict": True}
    tools = [Tool.model_validate({"type": "function", "function": function})]
    found = format_of(SHOWN[family]).family(tokens.get).structure(tools, one_at_most, max_bytes)
    assert found
    return found


def allowed(
    wanted: StructuredOutputsParams, text: str, tokens: Mapping[str, int] = MappingProxyType({})
) -> bool:
    try:
        follows(wanted, text, tokens)
    except AssertionError:
        return False
    return True


def call(family: str, *values: tuple[str, str], name: str = "f") -> str:
    """Returns a call with values as they are written."""
    match family:
        case "qwen-coder":
            middle = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
            return f"<tool_call>\n<function={name}>\n{middle}</function>\n</tool_call>"
        case "glm":
            middle = "".join(
                f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values
            )
            return f"<tool_call>{name}\n{middle}</tool_call>"
        case "pythonic":
            return f"[{name}({', '.join(f'{key}={value}' for key, value in values)})]"
    fields = ", ".join(f"{json.dumps(key)}: {value}" for key, value in values)
    return f'<tool_call>\n{{"name": "{name}", "arguments": {{{fields}}}}}\n</tool_call>'


def calls_of(family: str, text: str, parameters: Mapping[str, Any], name: str = "f") -> list[tuple[str, Any]]:
    """Returns the calls that the family's reader finds."""
    reading = TextReading(family.removesuffix("-v3.1"), types=types_of({name: parameters}))
    return [(piece.name or "", json.loads(piece.arguments)) for piece in read_all(reading, [text]).pieces]


# ---- text ----


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("phi", "Write:\nimport functools\nprint(functools.reduce)"),
        ("granite", "The tag <tool_call> begins a call, and so does <|tool_call|>."),
        ("hunyuan", "It is written <tool_calls>, and then a list."),
        ("mistral-list", "The tag is [TOOL_CALLS]."),
        ("pythonic", "[1] See the docs, [f] and f(x)"),
        ("pythonic", "[f](https://example.com)"),
        ("pythonic", "["),
        ("pythonic", "[two words]"),
        ("pythonic", " [two  words and (more)]"),
        ("pythonic", "[f\n]"),
        ("pythonic", "<"),
        ("pythonic", " "),
        ("json-in-text", "[1] See the docs {1}"),
    ],
)
def test_text_may_have_words_that_are_marks(family: str, text: str) -> None:
    assert allowed(grammar(family), text)
    assert calls_of(family, text, CITY) == []


# What a text may begin with: blanks and a bracket, a word, blanks, and something after it, from ASCII or not.
BLANK = st.sampled_from(["", "", " ", "\n ", "\x1c", "\xa0"])
BEGUN = st.tuples(
    BLANK,
    st.sampled_from(["", "[", "[", "[[", "<", "<|"]),
    BLANK,
    st.sampled_from(["", "f", "f", "two", "a.-", "²", "ä"]),
    BLANK,
    st.sampled_from(["", "(", "()", "()]", "(), f()]", "(x=1)]", "words]", "]", ",", "<", "-"]),
).map("".join)


@settings(deadline=None, max_examples=100)
@given(text=BEGUN)
def test_a_pythonic_text_is_free_where_the_reader_knows_that_it_is_no_call(text: str) -> None:
    """Where a call may have begun, the grammar allows none but those of the tools."""
    reader = TextReading("pythonic").new_reader()
    is_text = reader.feed(text).content == text
    calls = reader.end().pieces
    if allowed(grammar("pythonic", {"properties": {}}), text):
        assert [(each.name, each.arguments) for each in calls] in ([], [("f", "{}")], [("f", "{}")] * 2)
    else:
        assert not is_text or "<|" in text


@pytest.mark.parametrize(
    ("family", "before", "after"),
    [
        ("phi", "functools[", "]"),
        ("phi", "functools ", ""),
        ("granite", "Hm. <tool_call>[", "]"),
        ("granite", "<|tool_call|> ", ""),
        ("hunyuan", "<tool_calls>", ""),
        ("json-in-text", "[", "]"),
        ("json-in-text", "[ ", "]"),
    ],
)
def test_a_call_is_held_wherever_the_reader_finds_one(family: str, before: str, after: str) -> None:
    key = "parameters" if family == "json-in-text" else "arguments"
    right, wrong = (
        f'{before}{{"name": "f", "{key}": {{"{name}": "Rome"}}}}{after}' for name in ("city", "town")
    )
    assert calls_of(family, right, CITY) == [("f", {"city": "Rome"})]
    assert allowed(grammar(family), right) and not allowed(grammar(family), wrong)


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("qwen-coder", "<function=f>\n<parameter=KEY>\nRome\n</parameter>\n</function>"),
        (
            "kimi",
            '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"KEY": "Rome"}<|tool_call_end|>',
        ),
        ("deepseek-v3.1", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"KEY": "Rome"}<｜tool▁call▁end｜>'),
        ("pythonic", '[f(KEY="Rome")]'),
        ("pythonic", '<|python_start|>[f(KEY="Rome")]<|python_end|>'),
    ],
)
def test_a_call_is_held_without_the_marks_that_may_be_left_out(family: str, text: str) -> None:
    right, wrong = (text.replace("KEY", key) for key in ("city", "town"))
    assert calls_of(family, right, CITY) == [("f", {"city": "Rome"})]
    assert allowed(grammar(family), right) and not allowed(grammar(family), wrong)


JAMBA = (
    '<tool_calls>[\n    {"name": "f", "arguments": {"city": "Rome"}},\n'
    '    {"name": "f", "arguments": {"city": "Bari"}}\n]'
)
WRITTEN = [
    ("hunyuan", f"{JAMBA}</tool_calls>"),
    ("hunyuan", f"{JAMBA}\n</tool_calls>"),
    ("mistral-list", '[TOOL_CALLS] [{"name": "f", "arguments": {"city": "Rome"}}]'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"city": "Rome"}}</tool_call>'),
    (
        "glm",
        "<tool_call>f<arg_key>city</arg_key><arg_value>Rome</arg_value></tool_call>"
        "<tool_call>f<arg_key>city</arg_key>\n<arg_value>Bari</arg_value></tool_call>",
    ),
    ("mistral", '[TOOL_CALLS]f[CALL_ID]a1B2c3D4e[ARGS]{"city": "Rome"}[TOOL_CALLS]f[ARGS] {"city": "Bari"}'),
    ("deepseek-v3.1", "".join(
        ["<｜tool▁calls▁begin｜>"]
        + ['<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'] * 2
        + ["<｜tool▁calls▁end｜>"]
    )),
    ("harmony", '<|channel|>commentary to=functions.f<|message|>{"city": "Rome"}'),
    ("harmony", '<|channel|>commentary to=functions.f <|message|>{"city": "Rome"}'),
    ("harmony", '<|channel|>commentary to=functions.f json<|message|>{"city": "Rome"}'),
    ("harmony", '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"city": "Rome"}'),
]  # fmt: skip


@pytest.mark.parametrize(("family", "text"), WRITTEN)
@pytest.mark.parametrize("has_tokens", [False, True], ids=["text", "tokens"])
def test_calls_may_be_written_as_models_write_them(family: str, text: str, has_tokens: bool) -> None:
    marks = format_of(SHOWN[family]).family(no_token).marks
    tokens = {mark: 360 + number for number, mark in enumerate(marks)} if has_tokens else {}
    assert allowed(grammar(family, tokens=tokens), text, tokens)
    assert calls_of(family, text, CITY)[0] == ("f", {"city": "Rome"})
    assert not allowed(grammar(family, tokens=tokens), text.replace("city", "town"), tokens)
    too_many = text.count('"city"') + text.count(">city<") > 1
    assert allowed(grammar(family, tokens=tokens, one_at_most=True), text, tokens) != too_many


# ---- values that are written one by one ----


@pytest.mark.parametrize("end", ["Rome\n", "Rome", "", "\n", "a\nb\n\n"])
def test_a_text_of_qwens_coder_may_end_without_a_line_break(end: str) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=city>\n{end}</parameter>\n</function>\n</tool_call>"
    assert allowed(grammar("qwen-coder"), text)
    assert calls_of("qwen-coder", text, CITY) == [("f", {"city": end.removesuffix("\n")})]


@pytest.mark.parametrize("tag", ["KEY", "<tool_call>", "</tool_call>"])
@pytest.mark.parametrize(("family", "key"), [("qwen-coder", "<parameter="), ("glm", "<arg_key>")])
def test_a_free_text_has_no_tags_that_end_it(family: str, key: str, tag: str) -> None:
    tag = tag.replace("KEY", key)
    assert allowed(grammar(family), call(family, ("city", "a <param> <arg b </tool> c")))
    assert not allowed(grammar(family), call(family, ("city", f"a {tag}b> c")))
    with pytest.raises(InvalidRequest, match="its own marks"):
        grammar(family, {"properties": {"a": {"enum": ["b", f"a {tag}"]}}})


DEFINITIONS = {
    "unit": {"enum": ["C", "F"], "type": "string"},
    "count": {"type": "integer", "minimum": 3},
    "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
    "loop": {"$ref": "#/$defs/loop"},
}
COUNT, UNIT = {"$ref": "#/$defs/count"}, {"$ref": "#/$defs/unit"}
# A schema, what a grammar allows of it (with a text as tags have it), and what it does not.
VALUES: list[tuple[Any, Sequence[str], Sequence[str]]] = [
    (COUNT, ["3", "41"], ["2", "x", "3.5"]),
    (UNIT, ["C", "F"], ["K", "CF"]),
    ({"allOf": [UNIT], "default": "C", "description": "of the result"}, ["C"], ["K"]),
    ({"anyOf": [UNIT, {"type": "null"}]}, ["C", "null"], ["K", "nul"]),
    ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, ["7", "null"], ["x", "7.5"]),
    ({"type": ["integer", "null"]}, ["7", "null"], ["x"]),
    ({"anyOf": [COUNT, {"type": "array", "items": COUNT}]}, ["3", "[3]"], ["2", "[2]"]),
    ({"const": "C"}, ["C"], ["K"]),
    ({"oneOf": [{"const": "C", "title": "Celsius"}, {"const": "F"}]}, ["C", "F"], ["K"]),
    ({"const": 5}, ["5"], ["6", "x"]),
    ({"enum": ["C", 5, None]}, ["C", "5", "null"], ["K", "6"]),
    ({"type": "string", "enum": ["C", 5]}, ["C"], ["5"]),
    # (Its text would be read as a number that is not in the list.)
    ({"enum": ["C", "5", 6]}, ["C", "6"], []),
    ({"$ref": "#/$defs/tree"}, ["[]", "[[], [[]]]"], ["[1]"]),
    ({"$ref": "#/properties/twin"}, ["true"], ["x"]),
    ({"type": "array", "items": {"$ref": "#/properties/twin"}}, ["[true]"], ["[1]"]),
    ({"type": "object", "properties": {"description": COUNT}}, ['{"description": 3}'], ['{"description": 2}']),
]  # fmt: skip


def parameters_of(schema: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"it": schema, "twin": {"type": "boolean"}},
        "required": ["it"],
        "$defs": DEFINITIONS,
    }


@pytest.mark.parametrize("family", [*KEYED, "hermes"])
@pytest.mark.parametrize(("schema", "right", "wrong"), VALUES, ids=[str(case[0]) for case in VALUES])
def test_values_follow_their_schema(
    family: str, schema: Any, right: Sequence[str], wrong: Sequence[str]
) -> None:
    parameters = parameters_of(schema)
    wanted = grammar(family, parameters)
    for text in (*right, *wrong):
        is_word = text.isalpha() and text not in ("null", "true")
        value = f'"{text}"' if family in ("pythonic", "hermes") and is_word else text
        written = call(family, ("it", value))
        assert allowed(wanted, written) == (text in right), text
        if text in right:
            expected = text if is_word else json.loads(text)
            assert calls_of(family, written, parameters) == [("f", {"it": expected})]


@pytest.mark.parametrize("family", ["qwen-coder", "glm"])
@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": ["string", "null"]}, "90210", "90210"),
        ({"type": ["string", "null"]}, "null", None),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", "None"),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "90210", 90210),
        ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, "1.5", "1.5"),
        ({"anyOf": [{"type": "string"}, {"type": "number"}]}, "NaN", "NaN"),
        ({"type": ["string", "null"]}, '"Rome"', '"Rome"'),
        ({"$ref": "#/$defs/unit"}, "C", "C"),
        ({"$ref": "#/$defs/loop"}, "5", 5),
        ({"const": "5"}, "5", "5"),
        ({"allOf": [{"type": "string"}, {"minLength": 1}]}, "5", "5"),
    ],
)
def test_a_text_is_read_as_a_type_that_the_schema_allows(
    family: str, schema: Any, text: str, value: Any
) -> None:
    parameters = parameters_of(schema)
    written = call(family, ("it", text))
    assert allowed(grammar(family, parameters), written)
    assert calls_of(family, written, parameters) == [("f", {"it": value})]


# ---- names ----

FREE = [
    {"type": "object"},
    {"type": "object", "allOf": [{"properties": {"b": {}}}]},
    {"anyOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]},
    {"properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": {"type": "integer"}},
    {"$ref": "#/$defs/any", "$defs": {"any": {"type": "object"}}},
]  # fmt: skip


@pytest.mark.parametrize("family", KEYED)
@pytest.mark.parametrize("parameters", FREE, ids=map(str, FREE))
def test_arguments_may_have_other_names_where_the_schema_allows_them(
    family: str, parameters: dict[str, Any]
) -> None:
    text = call(family, ("a", "1"), ("b", "2"))
    assert allowed(grammar(family, parameters), text)
    assert calls_of(family, text, parameters) == [("f", {"a": 1, "b": 2})]


@pytest.mark.parametrize("family", KEYED)
def test_other_names_do_not_free_those_that_the_schema_has(family: str) -> None:
    parameters = {
        "properties": {"a": {"type": "integer"}},
        "required": ["a", "c"],
        "additionalProperties": {"type": "integer"},
    }
    wanted = grammar(family, parameters)
    assert allowed(wanted, call(family, ("a", "1"), ("c", "1"), ("ab", "2")))
    for wrong in (
        [("a", "1"), ("b", "2")],
        [("a", "1"), ("c", "1"), ("a", "2")],
        [("a", "1"), ("c", "1"), (" a", "2")],
        [("a", "1"), ("c", "1"), ("b", "true")],
    ):
        assert not allowed(wanted, call(family, *wrong)), wrong


@pytest.mark.parametrize("family", [*KEYED, "hermes"])
def test_a_reference_at_the_top_is_followed(family: str) -> None:
    parameters = {"$ref": "#/$defs/place", "$defs": {"place": CITY | {"additionalProperties": False}}}
    rome = ("city", "Rome" if family in ("qwen-coder", "glm") else '"Rome"')
    wanted = grammar(family, parameters)
    assert allowed(wanted, call(family, rome))
    assert not allowed(wanted, call(family)) and not allowed(wanted, call(family, ("town", rome[1])))
    assert calls_of(family, call(family, rome), parameters) == [("f", {"city": "Rome"})]


@pytest.mark.parametrize("family", KEYED)
@pytest.mark.parametrize("properties", [{}, {"properties": {}}])
def test_a_function_may_have_no_arguments(family: str, properties: dict[str, Any]) -> None:
    wanted = grammar(family, properties | {"additionalProperties": False})
    assert allowed(wanted, call(family)) and not allowed(wanted, call(family, ("a", "1")))


@pytest.mark.parametrize("name", ["f", "get-weather", "from", "a.b", "7"])
@pytest.mark.parametrize("key", ["x", "from", "a-b", "größe", "$x"])
def test_calls_like_pythons_may_have_other_names_than_pythons(name: str, key: str) -> None:
    parameters = {"properties": {key: {"type": "string"}}, "required": [key]}
    text = call("pythonic", (key, '"a \\"b), [c(d=1)]"'), name=name)
    assert allowed(grammar("pythonic", parameters, name), text)
    assert calls_of("pythonic", text, parameters, name) == [(name, {key: 'a "b), [c(d=1)]'})]


@pytest.mark.parametrize(
    ("family", "key"),
    [("pythonic", "a b"), ("pythonic", "a=b"), ("qwen-coder", "a>b"), ("glm", " a"), ("glm", "a\nb")],
)
def test_names_that_the_reader_can_not_find_are_refused(family: str, key: str) -> None:
    with pytest.raises(InvalidRequest, match="can't write an argument of this name") as error:
        grammar(family, {"properties": {key: {}}})
    assert repr(key) in str(error.value)


@pytest.mark.parametrize("family", KEYED)
@pytest.mark.parametrize("text", ["a::=b", "::=", 'a"\\b'])
def test_names_and_values_are_escaped(family: str, text: str) -> None:
    key = text if family != "pythonic" else "a::b"
    wanted = grammar(family, {"properties": {key: {"enum": [text]}}, "required": [key]})
    assert allowed(wanted, call(family, (key, json.dumps(text) if family == "pythonic" else text)))


@pytest.mark.parametrize("family", ["qwen-coder", "glm"])
@pytest.mark.parametrize("properties", [{"\ud800": {}}, {"a": {"enum": ["\ud800"]}}])
def test_half_of_a_surrogate_pair_is_refused(family: str, properties: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="surrogate"):
        grammar(family, {"properties": properties})


@pytest.mark.parametrize("family", KEYED)
@pytest.mark.parametrize(
    ("parameters", "reason"),
    [
        ({"properties": {}, "required": ["a"], "additionalProperties": False}, "'a' is required"),
        ({"properties": {"a": {"type": "array", "items": {"$ref": "#/$defs/x"}}}}, "#/$defs/x"),
    ],
)
def test_what_no_call_can_follow_is_refused(family: str, parameters: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidRequest) as error:
        grammar(family, parameters)
    assert reason in str(error.value)


# ---- size ----


@pytest.mark.parametrize("family", [*KEYED, "hermes"])
def test_definitions_take_room_where_they_are_needed(family: str) -> None:
    large = {"type": "array", "items": {"enum": list(range(2000))}, "description": "n" * 40000}
    parameters = {
        "properties": {f"a{n}": {"type": "integer", "title": "t" * 999} for n in range(60)}
        | {f"b{n}": {"$ref": "#/$defs/large", "description": "d" * 999} for n in range(60)},
        "$defs": {"large": large, "unused": {"enum": list(range(20000))}},
    }
    assert len(grammar(family, parameters).text) < 40000
    with pytest.raises(InvalidRequest, match="more than 4000 bytes"):
        grammar(family, parameters, max_bytes=4000)


@pytest.mark.parametrize("family", KEYED)
@pytest.mark.parametrize("reference", [{"$ref": "#/$defs/d"}, {"anyOf": [{"$ref": "#/$defs/d"}]}])
def test_alternatives_that_many_arguments_have_are_written_once(
    family: str, reference: Mapping[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """250 alternatives of 150 arguments, as they may come in a small body."""
    rendered: list[Any] = []
    json_rule = keyed_grammar.json_rule

    def noted(schema: Mapping[str, Any]) -> str:
        rendered.append(schema)
        return json_rule(schema)

    monkeypatch.setattr(keyed_grammar, "json_rule", noted)
    names = [f"a{n}" for n in range(150)]
    definition = {"anyOf": [*({"type": "null"} for _ in range(247)), *({"const": n} for n in (7, 8, 9))]}
    parameters = {
        "properties": dict.fromkeys(names, reference),
        "required": names,
        "$defs": {"d": definition},
    }
    found = grammar(family, parameters)
    assert len(rendered) <= 250
    values = [(name, ("null", "7", "8", "9")[n % 4]) for n, name in enumerate(names)]
    assert allowed(found, call(family, *values))
    assert not allowed(found, call(family, *values[:-1], (names[-1], "6")))


@pytest.mark.parametrize("family", KEYED)
def test_a_grammar_ends_where_it_becomes_too_large(family: str) -> None:
    """Each of these arguments needs the definition for itself: 48 MB in all."""
    definitions = {"large": {"type": "array", "items": {"enum": list(range(10000))}}}
    properties = {f"a{n}": {"$ref": "#/$defs/large", "minItems": n} for n in range(800)}
    parameters = {"properties": properties, "$defs": definitions}
    tracemalloc.start()
    try:
        with pytest.raises(InvalidRequest, match="more than 65536 bytes"):
            grammar(family, parameters)
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def counts(number: int) -> dict[str, Any]:
    properties = {f"p{n}": {"type": "integer", "title": "t"} for n in range(number)}
    return {"type": "object", "properties": properties}


@pytest.mark.parametrize("family", KEYED)
@pytest.mark.parametrize(
    "schema_of",
    [
        lambda n: {"$ref": "#/$defs/large", "description": f"of {n}"},
        lambda n: {"type": "array", "items": {"$ref": f"#/$defs/{'%6Carge' if n % 2 else 'large'}"}},
        lambda n: {"anyOf": [{"$ref": "#/$defs/many"}, {"type": "null", "title": f"{n}"}]},
    ],
)
def test_arguments_with_equal_schemas_are_gone_through_once(
    family: str, schema_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_steps = 0
    plain = schemas._stripped

    def counted(schema: Any, named: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        return plain(schema, named)

    monkeypatch.setattr(schemas, "_stripped", counted)
    definitions = {"large": counts(300), "many": {"anyOf": [counts(n) for n in range(20)]}}
    properties = {f"a{n}": schema_of(n) for n in range(100)}
    grammar(family, {"properties": properties, "$defs": definitions})
    assert 300 < num_steps < 3000


INDIRECT: Any = (lambda n: {"type": "array", "items": {"$ref": f"#/$defs/to{n}"}}, counts(1200))
EITHER: Any = (lambda n: {"anyOf": [{"$ref": "#/$defs/large"}, {"const": n}]}, {"anyOf": [False] * 9000})


@pytest.mark.parametrize(
    ("family", "schema_of", "large"),
    [*((family, *INDIRECT) for family in KEYED), ("qwen-coder", *EITHER), ("glm", *EITHER)],
)
def test_schemas_that_refer_to_too_much_are_refused(family: str, schema_of: Any, large: Any) -> None:
    """None is equal to another before all has been looked at that they refer to, and the grammar would have room."""
    properties = {f"a{n}": schema_of(n) for n in range(250)}
    definitions = {f"to{n}": {"$ref": "#/$defs/large"} for n in range(250)}
    with pytest.raises(
        InvalidRequest,
        match="with all that they refer to, are too large|refers to large parts of itself too often",
    ):
        grammar(family, {"properties": properties, "$defs": definitions | {"large": large}})


def test_schemas_that_are_nested_too_deeply_are_refused() -> None:
    schema: dict[str, Any] = {"type": "array"}
    for _ in range(5000):
        schema = {"type": "array", "items": schema}
    for family in (*KEYED, "hermes"):
        with pytest.raises(InvalidRequest, match="nested too deeply"):
            grammar(family, {"properties": {"a": schema}})
