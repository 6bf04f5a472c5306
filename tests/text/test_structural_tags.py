"""Structural tags: what may come outside of tags, and within them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve import demo
from alignedserve.structured_outputs import StructuredOutputsParams, Thoughts
from alignedserve.text.grammar import Grammars
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.types import InvalidRequest

TOKENIZER = Tokenizer.from_directory(demo.MODEL_DIR)
EOS = TOKENIZER.eos_token_id
assert EOS is not None
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer"}},
    "required": ["a"],
    "additionalProperties": False,
}
NOTHING = {"type": "object", "additionalProperties": False}
TEXT = {"type": "any_text"}
TAG = {
    "type": "tag",
    "begin": "<f=x>",
    "content": {"type": "json_schema", "json_schema": SCHEMA},
    "end": "</f>",
}
CALL = '<f=x>{"a": 1}</f>'
TRIGGERED = {"type": "triggered_tags", "triggers": ["<f="], "tags": [TAG]}
LISTED = {"type": "tags_with_separator", "tags": [TAG], "separator": ", "}
OLDER = {
    "structures": [
        {"begin": "<f=x>", "schema": SCHEMA, "end": "</f>"},
        {"begin": "<f=y>", "schema": NOTHING, "end": "</f>"},
    ],
    "triggers": ["<f="],
}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    assert EOS is not None
    return Grammars(lambda: TOKENIZER, 400, frozenset([EOS]))


def accepted(grammars: Grammars, tag: Any, text: str, thoughts: Thoughts | None = None) -> tuple[str, bool]:
    """Returns how much of the text may come, and whether the output may end there."""
    matcher = grammars.matcher(StructuredOutputsParams(structural_tag=tag, thoughts=thoughts), "")
    output: list[int] = []
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if not matcher.allowed(output)[token]:
            break
        output.append(token)
    return TOKENIZER.decode(output, skip_special_tokens=False), bool(matcher.allowed(output)[EOS])


@pytest.mark.parametrize(
    ("form", "text", "come", "may_end"),
    [
        (OLDER, "hello", "hello", True),
        (OLDER, f"hi {CALL} and <f=y>{{}}</f>!", f"hi {CALL} and <f=y>{{}}</f>!", True),
        (OLDER, "hi <f=z>", "hi <f=", False),
        (OLDER, 'hi <f=x>{"b', 'hi <f=x>{"', False),
        (OLDER, "a < f", "a < f", True),
        (json.dumps(OLDER), "hi <f=z>", "hi <f=", False),
        (TRIGGERED, f"hi {CALL}!", f"hi {CALL}!", True),
        (TRIGGERED | {"at_least_one": True}, "hi", "hi", False),
        (TRIGGERED | {"at_least_one": True}, f"hi {CALL}!", f"hi {CALL}!", True),
        (TRIGGERED | {"stop_after_first": True}, f"hi {CALL}!", f"hi {CALL}", True),
        (TRIGGERED | {"stop_after_first": True}, "hi", "hi", True),
        (TRIGGERED | {"stop_after_first": True, "at_least_one": True}, "hi", "hi", False),
        (LISTED, "", "", True),
        (LISTED, f"{CALL}, {CALL}", f"{CALL}, {CALL}", True),
        (LISTED, f"{CALL}, no", f"{CALL}, ", False),
        (LISTED | {"at_least_one": True}, "", "", False),
        (LISTED | {"stop_after_first": True}, f"{CALL},", CALL, True),
        ({"type": "const_string", "value": 'a "b"\n'}, 'a "b"\n', 'a "b"\n', True),
        ({"type": "regex", "pattern": "[0-9]+/x"}, "12/x", "12/x", True),
        ({"type": "grammar", "grammar": 'root ::= "yes" | "no"'}, "no", "no", True),
        ({"type": "or", "elements": [TAG, {"type": "const_string", "value": "no"}]}, "no", "no", True),
        ({"type": "sequence", "elements": [TAG, TEXT]}, f"{CALL} and so", f"{CALL} and so", True),
        ({"type": "sequence", "elements": [TAG, TEXT]}, "no", "", False),
        ({"type": "tag", "begin": "<t>", "content": TEXT, "end": ["</t>", "."]}, "<t>a b.c", "<t>a b.", True),
        (TEXT, "anything", "anything", True),
        # A special token of the model begins a tag only as the token.
        (
            {
                "type": "triggered_tags",
                "triggers": ["<|reserved_0|>"],
                "tags": [
                    {"type": "tag", "begin": "<|reserved_0|>x", "content": TEXT, "end": "<|reserved_1|>"}
                ],
            },
            "a<|reserved_0|>xbc<|reserved_1|>d",
            "a<|reserved_0|>xbc<|reserved_1|>d",
            True,
        ),
    ],
)
def test_what_may_come(grammars: Grammars, form: Any, text: str, come: str, may_end: bool) -> None:
    tag = form if form is OLDER or isinstance(form, str) else {"format": form}
    assert accepted(grammars, tag, text) == (come, may_end)


def test_thoughts_come_before_it(grammars: Grammars) -> None:
    text = f"<f=z> hm</think>\nso {CALL}"
    assert accepted(grammars, OLDER, text, Thoughts("</think>")) == (text, True)
    assert accepted(grammars, OLDER, "a</think><f=z>", Thoughts("</think>")) == ("a</think><f=", False)
    optional = Thoughts("</think>", "<think>")
    for text in (f"<think>hm</think>\nso {CALL}", f"so {CALL}"):
        assert accepted(grammars, OLDER, text, optional) == (text, True)
    assert accepted(grammars, OLDER, "<think>a</think><f=z>", optional) == ("<think>a</think><f=", False)


@pytest.mark.parametrize(
    ("tag", "reason"),
    [
        ({}, "must have a format, or structures and triggers"),
        ({"structures": [{"begin": "<f"}], "triggers": ["<f"]}, "a structure must have"),
        ({"structures": [{"begin": "<g", "end": ""}], "triggers": ["<f"]}, "no trigger begins the tag '<g'"),
        ({"structures": [{"begin": "<g", "end": ""}], "triggers": [""]}, "no trigger begins the tag '<g'"),
        ({"format": {"type": "some"}}, "format 'some': must be one of const_string"),
        ({"format": {"type": "sequence", "elements": [TEXT, TAG]}}, "any_text: only at the end"),
        ({"format": {"type": "sequence", "elements": [5]}}, "format 5: must be one of"),
        ({"format": {"type": "tag", "begin": "<t>", "content": TEXT, "end": ""}}, "free text needs a text"),
        ({"format": TEXT | {"excludes": ["x"]}}, "excludes: not supported"),
        ({"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}}, "a part that is not"),
        ("{", "Expecting"),
    ],
)
def test_what_is_wrong_is_named(grammars: Grammars, tag: Any, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=r"^structured_outputs\.structural_tag: ") as raised:
        grammars.check(StructuredOutputsParams(structural_tag=tag))
    assert reason in str(raised.value)


def test_a_deep_format_is_refused(grammars: Grammars) -> None:
    tag = '{"format":' + '{"type":"or","elements":[' * 900 + '{"type":"any_text"}' + "]}" * 900 + "}"
    with pytest.raises(InvalidRequest, match="nested too deeply|stack|limit|large|complex"):
        grammars.check(StructuredOutputsParams(structural_tag=tag))
