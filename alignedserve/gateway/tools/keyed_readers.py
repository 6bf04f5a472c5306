"""Parses calls whose arguments are written one by one between tags, as Qwen3-Coder and GLM write them.

A value is text; what it is in JSON follows from the tool's parameters. So a call is sent when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.tools.calls import Read
from alignedserve.gateway.tools.readers import Cursor

# The types of each tool's parameters, by names; "" where the schema says nothing simple.
Types = Mapping[str, Mapping[str, str]]


@dataclass(frozen=True)
class Keyed:
    opening: str
    closing: str
    # Finds the name, which is its group, at the beginning of what is between the two.
    name: re.Pattern[str]
    # Finds the arguments after it, each with two groups: its name and its value.
    argument: re.Pattern[str]


QWEN_CODER = Keyed(
    "<tool_call>",
    "</tool_call>",
    re.compile(r"\s*<function=([^>\n]{1,64})>"),
    re.compile(r"<parameter=([^>\n]{1,256})>\n?((?:(?!<parameter=).)*?)\n?</parameter>", re.DOTALL),
)
GLM = Keyed(
    "<tool_call>",
    "</tool_call>",
    re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})\s*(?=<arg_key>|$)"),
    re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL),
)


class KeyedReader(Cursor):
    def __init__(self, keyed: Keyed, types: Types) -> None:
        super().__init__()
        self._keyed = keyed
        self._types = types
        # The text of the call that is being read; None outside of calls.
        self._call: list[str] | None = None
        # Whether a line break comes between calls, which is no content.
        self._skips_breaks = False

    def end(self) -> Read:
        text = self._take()
        if self._call is None:
            return Read(text)
        return Read(self._keyed.opening + "".join(self._call) + text)

    def _step(self, read: Read) -> bool:
        if self._call is None:
            while self._skips_breaks and self._at < len(self._text):
                self._skips_breaks = self._text[self._at] == "\n"
                self._at += self._skips_breaks
            before, is_found = self._until(self._keyed.opening)
            read.content += before
            if is_found:
                self._call = []
            return is_found
        inside, is_found = self._until(self._keyed.closing)
        self._call.append(inside)
        if is_found:
            self._read_call("".join(self._call), read)
            self._call = None
        return is_found

    def _read_call(self, text: str, read: Read) -> None:
        name = self._keyed.name.match(text)
        if name is None:
            read.content += self._keyed.opening + text + self._keyed.closing
            return
        types = self._types.get(name[1], {})
        arguments = {
            key.strip(): _value(value, types.get(key.strip(), ""))
            for key, value in self._keyed.argument.findall(text, name.end())
        }
        read.begin(name[1], json.dumps(arguments, ensure_ascii=False))
        self._skips_breaks = True


def _value(text: str, kind: str) -> Any:
    """Returns the value that the text stands for: the text itself for a string, and where it is no JSON."""
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


def types_of(schemas: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, str]]:
    """`schemas` are those of the tools' parameters, by the tools' names."""
    return {name: _types_in(schema or {}) for name, schema in schemas.items()}


def _types_in(schema: Mapping[str, Any]) -> dict[str, str]:
    properties = schema.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _type_in(each) for name, each in properties.items()}


def _type_in(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, dict) else None
    if isinstance(kind, str):
        return kind
    values: Sequence[Any] = schema.get("enum") or () if isinstance(schema, dict) else ()
    return "string" if values and all(isinstance(value, str) for value in values) else ""
