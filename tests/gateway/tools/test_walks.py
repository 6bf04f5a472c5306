"""Walks through the grammars of strict calls, by tokens that they allow: what comes out is read with the family's
reader, and the calls follow their schemas."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from alignedserve.gateway.tools.bodies import Tool
from alignedserve.gateway.tools.keyed_readers import types_of
from alignedserve.gateway.tools.reading import TextReading, format_of
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.text.grammar import Grammars
from alignedserve.types import InvalidRequest
from tests.gateway.scripted import EOS, TOKENIZER
from tests.gateway.tools.test_families import MOST, no_token, read_all
from tests.gateway.tools.test_grammars import SHOWN

GRAMMARS = Grammars(lambda: TOKENIZER, 384, frozenset([EOS]))
# With each of these a call has begun that the grammar demands to its end.
OPENINGS = {
    "hermes": ["<tool_call>"],
    "harmony": ["<|channel|>commentary to=functions.NAME"],
    "json-in-text": ["{", "[{"],
    "mistral-list": ["[TOOL_CALLS][", "[TOOL_CALLS] {"],
    "mistral": ["[TOOL_CALLS]"],
    "deepseek": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    "deepseek-v3.1": ["<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    "kimi": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>"],
    "granite": ["<|tool_call|>[", "<tool_call>\n{"],
    "phi": ["functools[", "<|tool_call|>[", "functools {"],
    "hunyuan": ["<tool_calls>[\n", "<tool_calls>{"],
    "qwen-coder": ["<tool_call>", "<function=NAME>"],
    "glm": ["<tool_call>"],
    "pythonic": ["[NAME(", "<|python_start|>"],
}
# Where much is allowed, the walk tries one of these instead of going on for ever.
WAYS = (
    '"',
    " ",
    "</parameter>",
    "</arg_value>",
    "</function>",
    "<parameter=",
    "<arg_key>",
    "{",
    "[",
    "[f(",
    "\n",
)
# Near its end the walk takes the first of these that is allowed.
ENDS = [EOS, *(TOKENIZER.encode(text)[0] for text in '"]})>/0 ')]
_BREAK = TOKENIZER.encode("\n")[0]
MOST_TOKENS = 1500


@dataclass(frozen=True)
class Walk:
    text: str
    # Whether the grammar has allowed the opening, to its end.
    is_opened: bool


def walk(wanted: StructuredOutputsParams, opening: str, marks: Sequence[str], seed: int) -> Walk | None:
    """Returns None if there are too many tokens."""
    draw = random.Random(seed)
    matcher = GRAMMARS.matcher(wanted, "")
    ways = [TOKENIZER.encode(text) for text in (*WAYS, *marks)]
    output: list[int] = []
    planned, is_opened = TOKENIZER.encode(opening), True
    while len(output) < MOST_TOKENS:
        is_allowed = matcher.allowed(output)
        if planned and is_allowed[planned[0]]:
            output.append(planned.pop(0))
            continue
        is_opened &= not (planned and len(output) < len(opening.encode()))
        planned = []
        allowed = np.flatnonzero(is_allowed).tolist()
        assert allowed, TOKENIZER.decode(output)
        if len(allowed) > 60 and draw.random() < 0.3:
            # No line breaks: in a string of JSON.
            planned = list(draw.choice(ways if is_allowed[_BREAK] else ways[:2]))
        token = draw.choice(allowed)
        if len(output) > MOST_TOKENS // 4:
            token = next((each for each in ENDS if is_allowed[each]), token)
        if not planned or not is_allowed[planned[0]]:
            if token == EOS:
                return Walk(TOKENIZER.decode(output), is_opened)
            planned = [token]
    return None


def calls_in(family: str, tools: Sequence[Tool], text: str) -> list[tuple[str, Any]]:
    found = format_of(SHOWN[family])
    types = types_of({tool.function.name: tool.function.parameters for tool in tools})
    reading = TextReading(found.held_name or found.name, types=types)
    return [(piece.name or "", json.loads(piece.arguments)) for piece in read_all(reading, [text]).pieces]


# ---- schemas ----

TEXTS = ["C", "F", "5", "null", "a\nb", " ", "x::=y", "größe", "</p>"]
BOUNDED = st.builds(lambda low, room: {"type": "integer", "minimum": low, "maximum": low + room},
                    st.integers(-20, 20), st.integers(0, 200))  # fmt: skip
LISTED = st.lists(st.sampled_from(TEXTS), min_size=1, max_size=3, unique=True)
PLAIN = st.one_of(
    st.sampled_from([{"type": kind} for kind in ("string", "integer", "number", "boolean", "null")]),
    BOUNDED,
    LISTED.map(lambda texts: {"enum": texts}),
    LISTED.map(lambda texts: {"type": "string", "enum": texts}),
    st.sampled_from([*TEXTS, 7, True, None, [1], {"a": 1}]).map(lambda value: {"const": value}),
    st.lists(st.sampled_from(["C", "7", 8, None, False]), min_size=1, unique_by=repr).map(
        lambda v: {"enum": v}
    ),
    # A text beside values of other types that nothing more is asked of.
    st.lists(st.sampled_from(["string", "null", "boolean", "integer"]), min_size=1, unique=True).map(
        lambda kinds: {"type": kinds}
    ),
    st.sampled_from(["unit", "count", "tree", "either"]).map(lambda name: {"$ref": f"#/$defs/{name}"}),
)
DEFINITIONS = {
    "unit": {"type": "string", "enum": ["C", "F"], "title": "unit"},
    "count": {"type": "integer", "minimum": 3},
    "tree": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 2},
    "either": {"anyOf": [{"$ref": "#/$defs/unit"}, {"$ref": "#/$defs/count"}, {"type": "null"}]},
}


def within(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.one_of(
        inner.map(lambda schema: {"type": "array", "items": schema, "maxItems": 3}),
        inner.map(lambda schema: {"anyOf": [schema, {"type": "null"}], "default": None}),
        inner.map(lambda schema: {"allOf": [schema], "description": "d"}),
        st.dictionaries(st.sampled_from(["title", "a", "$ref"]), inner, max_size=2).map(
            lambda found: {
                "type": "object",
                "properties": found,
                "required": sorted(found),
                "additionalProperties": False,
            }
        ),
    )


SCHEMAS = st.recursive(PLAIN, within, max_leaves=4)
NAMES = ["a", "city", "from", "a-b", "größe", "description", "$x", "x.y", "none"]


@st.composite
def parameters(draw: st.DrawFn) -> dict[str, Any]:
    found = draw(st.dictionaries(st.sampled_from(NAMES), SCHEMAS, max_size=4))
    required = draw(st.lists(st.sampled_from(sorted(found)), unique=True)) if found else []
    additional: list[dict[str, Any]] = [
        {},
        {"additionalProperties": False},
        {"additionalProperties": {"type": "integer"}},
    ]
    more = draw(st.sampled_from(additional))
    whole: dict[str, Any] = {"type": "object", "properties": found, "required": required, **more}
    if draw(st.booleans()):
        return {"$ref": "#/$defs/whole", "$defs": DEFINITIONS | {"whole": whole}}
    return whole | {"$defs": DEFINITIONS}


def tools_of(schemas: Sequence[dict[str, Any]], names: Sequence[str]) -> list[Tool]:
    functions = [
        {"name": name, "parameters": schema, "strict": True}
        for name, schema in zip(names, schemas, strict=False)
    ]
    return [Tool.model_validate({"type": "function", "function": each}) for each in functions]


def check(family: str, tools: Sequence[Tool], seed: int, one_at_most: bool) -> bool:
    """Walks once. Returns whether there was a call."""
    found = format_of(SHOWN[family]).family(no_token)
    wanted = found.structure(tools, one_at_most, MOST)
    assert wanted
    try:
        GRAMMARS.check(wanted)
    except InvalidRequest as error:
        # llguidance has no grammar of some schemas, and says so: a request with them is refused.
        event(str(error)[:60])
        return False
    names = [tool.function.name for tool in tools]
    opening = random.Random(seed).choice([*OPENINGS[family], ""]).replace("NAME", names[0])
    walked = walk(wanted, opening, [mark for mark in found.marks if mark != "<|end|>"], seed)
    if walked is None:
        return False
    calls = calls_in(family, tools, walked.text)
    assert calls or not opening or not walked.is_opened, walked.text
    assert len(calls) <= 1 or not one_at_most, walked.text
    for name, arguments in calls:
        assert name in names, walked.text
        schema = next(tool.function.parameters for tool in tools if tool.function.name == name)
        jsonschema.Draft202012Validator(schema).validate(arguments)
    return bool(calls)


@pytest.mark.parametrize("family", SHOWN)
@settings(deadline=None, max_examples=20)
@given(
    schemas=st.lists(parameters(), min_size=1, max_size=3),
    names=st.permutations(["f", "get-weather", "from", "a.b"]),
    seed=st.integers(0, 1 << 30),
    one_at_most=st.booleans(),
)
def test_calls_that_a_grammar_allows_follow_their_schemas(
    family: str, schemas: list[dict[str, Any]], names: list[str], seed: int, one_at_most: bool
) -> None:
    has_call = check(family, tools_of(schemas, names), seed, one_at_most)
    event("call" if has_call else "no call")


@pytest.mark.slow
@pytest.mark.parametrize("family", SHOWN)
def test_walks_come_to_calls(family: str) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    }
    tools = tools_of([schema, schema], ["f", "get-weather"])
    assert sum(check(family, tools, seed, one_at_most=False) for seed in range(30)) >= 10


def test_every_family_is_walked() -> None:
    assert OPENINGS.keys() == SHOWN.keys()
