"""Parses calls whose arguments are written one by one between tags, as Qwen3-Coder and GLM write them.

A value is text; what it is in JSON follows from the tool's parameters. So a call is sent when it is complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.tools.calls import Read, calls_in
from alignedserve.gateway.tools.overlap import overlap
from alignedserve.gateway.tools.readers import Cursor
from alignedserve.gateway.tools.schemas import ALL_KINDS, Document, kind_of

# The types of each tool's parameters, by names; "" where the schema says nothing simple.
Types = Mapping[str, Mapping[str, str]]


OPEN, CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class Keyed:
    # What begins a call, and what ends one that it has begun.
    closings: Mapping[str, Sequence[str]]
    # Finds the name, which is its group, at the beginning of a call.
    name: re.Pattern[str]
    # Finds the arguments after it, each with two groups: its name and its value.
    argument: re.Pattern[str]
    # What stands between two calls that one opening has begun.
    between: re.Pattern[str]
    # A call that ends with one of these is whole, even if nothing closes it.
    ends: tuple[str, ...]
    # An opening that is a part of the call.
    bare: str = ""


# The model leaves tags out at times: `<tool_call>`, `</parameter>`, `</function>`, `</tool_call>`.
QWEN_CODER = Keyed(
    {OPEN: (CLOSE,), "<function=": ("</function>", CLOSE)},
    re.compile(r"\s*<function=([^>\n]{1,64})>"),
    re.compile(
        r"<parameter=([^>\n]{1,256})>\n?(.*?)\n?"
        r"(?:</parameter>|(?=<parameter=|</function>\s*\Z)|\Z)",
        re.DOTALL,
    ),
    re.compile(r"</function>\s*(?:<tool_call>\s*)?(?=<function=)|<tool_call>\s*(?=<function=)"),
    ("</function>", "</parameter>"),
    bare="<function=",
)
GLM = Keyed(
    {OPEN: (CLOSE,)},
    re.compile(r"\s*([a-zA-Z0-9_.-]{1,64})\s*(?=<arg_key>|$)"),
    re.compile(r"<arg_key>([^<]*)</arg_key>\s*<arg_value>((?:(?!<arg_key>).)*?)</arg_value>", re.DOTALL),
    re.compile(r"<tool_call>"),
    ("</arg_value>",),
)


class KeyedReader(Cursor):
    def __init__(self, keyed: Keyed, types: Types) -> None:
        super().__init__()
        self.openings = tuple(keyed.closings)
        self._keyed = keyed
        self._types = types
        # What has begun the call that is being read, and its text; None outside of calls.
        self._opening = ""
        self._call: list[str] | None = None
        # Whether what stands between calls comes, which is no content: line breaks, and a closing tag.
        self._skips = False

    def end(self) -> Read:
        text = self._take()
        if self._call is None:
            return Read(text)
        text, read = "".join(self._call) + text, Read()
        closings = self._keyed.closings[self._opening]
        whole = text[: len(text) - max(overlap(text, 0, closing) for closing in closings)]
        if whole.rstrip().endswith(self._keyed.ends):
            self._read_call(whole, text[len(whole) :], read)
        else:
            read.content = self._opening + text
        return read

    def _step(self, read: Read) -> bool:
        if self._call is not None:
            return self._inside(self._call, read)
        if self._skips:
            return self._skip()
        before, is_found = self._until(*self.openings)
        read.content += before
        if is_found:
            self._opening, self._call = self._last_of(self.openings), []
        return is_found

    def _inside(self, call: list[str], read: Read) -> bool:
        closings = self._keyed.closings[self._opening]
        text, is_found = self._until(*closings)
        call.append(text)
        if is_found:
            self._call = None
            self._read_call("".join(call), self._last_of(closings), read)
        return is_found

    def _last_of(self, tags: Sequence[str]) -> str:
        """Returns the one of the tags that has just been taken."""
        return next(tag for tag in tags if self._text.endswith(tag, 0, self._at))

    def _skip(self) -> bool:
        """Returns False if more text is needed."""
        while self._text[self._at : self._at + 1] == "\n":
            self._at += 1
        rest = self._text[self._at : self._at + len(CLOSE)]
        if rest == CLOSE:
            self._at += len(CLOSE)
            return True
        self._skips = CLOSE.startswith(rest)
        return not self._skips

    def _read_call(self, text: str, closing: str, read: Read) -> None:
        """`text` comes between the opening and `closing`."""
        whole = text if self._opening != self._keyed.bare else self._opening + text
        parts = self._keyed.between.split(whole)
        names = [self._keyed.name.match(part) for part in parts]
        calls = [] if all(names) else calls_in(text)
        for part, name in zip(parts, names, strict=True) if all(names) else ():
            assert name
            calls.append((name[1], json.dumps(self._values(name, part), ensure_ascii=False)))
        for each in calls:
            read.begin(*each)
        read.content += "" if calls else self._opening + text + closing
        self._skips = bool(calls)

    def _values(self, name: re.Match[str], text: str) -> dict[str, Any]:
        types = self._types.get(name[1], {})
        return {
            key.strip(): _value(value, types.get(key.strip(), ""))
            for key, value in self._keyed.argument.findall(text, name.end())
        }


def _value(text: str, kind: str) -> Any:
    """Returns the value that the text stands for: the text itself for a string, and where it is no JSON."""
    kinds = kind.split()
    if kinds == ["string"]:
        return text
    try:
        found = json.loads(text)
        is_text = "string" in kinds and (isinstance(found, str) or kind_of(found) not in kinds)
        return text if is_text else found
    except (ValueError, RecursionError):
        if "string" in kinds:
            return text
        return {"true": True, "false": False, "none": None}.get(text.strip().lower(), text)


def types_of(schemas: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, str]]:
    """`schemas` are those of the tools' parameters, by the tools' names."""
    return {name: _types_in(schema or {}) for name, schema in schemas.items()}


def _types_in(schema: Mapping[str, Any]) -> dict[str, str]:
    document = Document(schema)
    properties = document.top.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _type_in(each, document) for name, each in properties.items()}


def _type_in(schema: Any, document: Document) -> str:
    """Returns the type; several, with blanks between them, for a text or a value of the other ones."""
    kinds = document.kinds(schema)
    if kinds == {"number", "integer"}:
        return "number"
    is_simple = len(kinds) == 1 or ("string" in kinds and kinds != ALL_KINDS)
    return " ".join(sorted(kinds)) if is_simple else ""
