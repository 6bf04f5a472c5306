"""How a model's chat template writes calls that the model may make or not: Hermes' and Qwen's
`<tool_call>{"name": …, "arguments": …}</tool_call>` with text around it, or Llama 3's bare JSON object.

A grammar of each, for functions that are `strict` and where there may be one call only: text is free, and once a call
begins, it is of one of the tools, with arguments as its schema has them (any object, for a tool that is not strict).
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from alignedserve.gateway.tools.bodies import Function, Tool
from alignedserve.gateway.tools.readers import HERMES_CLOSE, HERMES_OPEN, HermesReader, JsonReader, Reader
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest

# Whitespace is as text/grammar.py has it for schemas.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Family(ABC):
    reader: ClassVar[type[Reader]]
    # The key between a call's name and its arguments.
    key: ClassVar[str]

    def structure(self, tools: Sequence[Tool], one_at_most: bool) -> StructuredOutputsParams | None:
        """Returns the grammar of the text, or None if it needs none."""
        if not one_at_most and not any(tool.function.strict for tool in tools):
            return None
        rules = [*self._rules(one_at_most), _rule("call", " | ".join(f"call_{n}" for n in range(len(tools))))]
        for number, tool in enumerate(tools):
            opening = json.dumps(f'{{"name": "{tool.function.name}", "{self.key}": ')
            rules.append(_rule(f"call_{number}", f'{opening} arguments_{number} "}}"'))
            rules.append(_rule(f"arguments_{number}", f"%json {_schema(tool.function)}"))
        return StructuredOutputsParams(grammar="\n".join(rules))

    @abstractmethod
    def _rules(self, one_at_most: bool) -> list[str]:
        """Returns the rules of the grammar around `call`."""


class HermesFamily(Family):
    reader = HermesReader
    key = "arguments"

    def __init__(self, is_special: bool) -> None:
        """`is_special` says that the tag is a token which is no text."""
        self._is_special = is_special

    def _rules(self, one_at_most: bool) -> list[str]:
        tagged = 'opening "\\n" call "\\n" closing'
        opening, closing = json.dumps(HERMES_OPEN), json.dumps(HERMES_CLOSE)
        return [
            _rule("start", f"{tagged} | text" if one_at_most else f"({tagged})* text"),
            _rule("opening", f"TEXT {HERMES_OPEN}") if self._is_special else f"opening[lazy]: TEXT {opening}",
            _rule("closing", HERMES_CLOSE if self._is_special else closing),
            _rule("text", "TEXT"),
            _rule("TEXT", r"/(.|\n)*/"),
        ]


class LlamaFamily(Family):
    reader = JsonReader
    key = "parameters"

    def _rules(self, one_at_most: bool) -> list[str]:
        calls = "call" if one_at_most else 'call | "[" call (", " call)* "]"'
        return [_rule("start", f"TEXT | {calls}"), _rule("TEXT", r"/(\s*[^\s{\[](.|\n)*)?/")]


def family_of(template: str, is_special: bool) -> Family:
    """`template` is the model's for chats with tools, and `is_special` says that HERMES_OPEN is a token which is no
    text. Raises InvalidRequest for a template that shows no calls."""
    if HERMES_OPEN in template:
        return HermesFamily(is_special)
    if "ipython" in template or "python_tag" in template:
        return LlamaFamily()
    raise InvalidRequest(
        "tool_choice='auto': how this model's chat template writes tool calls is not known; "
        "say required, or name the tool"
    )


def _schema(function: Function) -> str:
    asked: dict[str, Any] = {}
    if function.strict and function.parameters:
        asked = function.parameters
    schema = {"type": "object"} | asked | {"x-guidance": _JSON_OPTIONS}
    # A grammar with `::=` would be taken for GBNF. In JSON it can only be in a string, where it may be escaped.
    return json.dumps(schema).replace("::=", ":\\u003a=")


def _rule(name: str, body: str) -> str:
    return f"{name}: {body}"
