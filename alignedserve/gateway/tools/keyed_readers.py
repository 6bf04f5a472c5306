"""Reads calls with arguments one by one between tags, as Qwen3-Coder and GLM write them.

A value is text, and the tool's parameters determine its JSON. So a call is sent when it is complete. Models sometimes
omit tags, and a value may contain tags. It ends at its closing tag, if there is one before the next argument, and
otherwise at the first tag that ends a call.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from alignedserve.gateway.tools.calls import json_of, object_of
from alignedserve.gateway.tools.keyed_tags import Keyed
from alignedserve.gateway.tools.marked_readers import BLANKS, HERMES_CLOSE, HermesReader
from alignedserve.gateway.tools.readers import Read
from alignedserve.gateway.tools.schemas import ALL_KINDS, Document, kind_of
from alignedserve.gateway.tools.tags import Rest

# Types of each tool's parameters, by tool and parameter name. "": no simple type.
Types = Mapping[str, Mapping[str, str]]


class KeyedReader(HermesReader):
    """Also reads calls in JSON, which models of these families sometimes write."""

    def __init__(self, keyed: Keyed, types: Types) -> None:
        super().__init__()
        self._keyed = keyed
        self._types = types
        # The call that is being read: its name, its arguments so far in JSON, and whether there was more than blanks
        # since its last tag.
        self._name = ""
        self._values: dict[str, str] = {}
        self._has_more = False
        # The argument that is being read.
        self._key = ""
        self._value: list[str] = []

    @property
    def open_text(self) -> Rest | None:
        return self._keyed.value if self._phase == self._in_value else super().open_text

    def _find(self, read: Read) -> bool:
        """A call without a mark has to be of a known tool, since a text may show an example of a call."""
        tags = self._keyed.openings
        found = tags.whole.search(self._text, self._at)
        if found is None:
            self._show(self._take(None if self._is_ended else tags.held(self._text, self._at)))
            return False
        is_bare = bool(found.lastindex)
        if is_bare and found[1] not in self._types:
            self._show(self._take(found.end()))
            return True
        self._show(self._take(found.start()))
        self._opened.append(self._take(found.start() if is_bare else found.end()))
        self._phase = self._open
        return True

    def _open(self, read: Read) -> bool:
        blanks = BLANKS.match(self._text, self._at)
        assert blanks
        self._opened.append(self._take(blanks.end()))
        head = self._keyed.head.whole.match(self._text, self._at)
        if head:
            self._opened.append(self._take(head.end()))
            self._name, self._values, self._has_more = head[1], {}, False
            self._phase = self._between
            return True
        if not self._is_ended and self._keyed.head.begun.fullmatch(self._text, self._at):
            return False
        return super()._open(read)

    def _between(self, read: Read) -> bool:
        """Continues a call, outside of values."""
        tags = self._keyed.tags
        found = tags.whole.search(self._text, self._at)
        more = self._take(found.start() if found else tags.held(self._text, self._at))
        self._opened.append(more)
        self._has_more |= bool(more.strip())
        if self._keyed.argument_opening in more or (self._has_more and not self._values):
            # This is text about calls, and no call.
            return self._give_up()
        if found is None:
            return self._is_ended and self._end(read)
        self._has_more = False
        if found.lastgroup == "key":
            self._opened.append(self._take(found.end()))
            self._key, self._value = found["key"].strip(), []
            self._phase = self._in_value
            return True
        self._send_call(read)
        # The mark's own closing tag may follow, or stands here.
        if found["end"] and found["end"] != HERMES_CLOSE:
            self._at = found.end()
        return True

    def _end(self, read: Read) -> bool:
        """The output ends inside a call. The call is complete if the model ended it after an argument."""
        rest = self._take()
        is_closing = any(tag.startswith(rest.strip()) for tag in self._keyed.closings)
        if self._values and is_closing and not self._has_more and not self._is_cut:
            self._send_call(read)
            return True
        self._opened.append(rest)
        return self._give_up()

    def _send_call(self, read: Read) -> None:
        self._begin(read, self._name, object_of(self._values))
        self._phase = self._after

    def _in_value(self, read: Read) -> bool:
        tags = self._keyed.value_ends
        found = tags.whole.search(self._text, self._at)
        stop = len(self._text) if self._is_ended else tags.held(self._text, self._at)
        self._value.append(self._take(found.start() if found else stop))
        if found is None and not self._is_ended:
            return False
        value = "".join(self._value)
        if found and found["key"] is None:
            self._opened.append(value + self._take(found.end()))
            self._keep(value)
            return True
        call_end = self._keyed.call_end.search(value)
        if found is None and (self._is_cut or not call_end):
            self._opened.append(value)
            return self._give_up()
        if call_end:
            self._put_back(value[call_end.start() :])
            value = value[: call_end.start()]
        self._opened.append(value)
        self._keep(value)
        return True

    def _keep(self, value: str) -> None:
        if self._keyed.has_lines:
            value = value.removeprefix("\n").removesuffix("\n")
        self._values[self._key] = _value(value, self._types.get(self._name, {}).get(self._key, ""))
        self._phase = self._between

    @property
    def _may_open(self) -> bool:
        bare = self._keyed.bare_opening
        return super()._may_open or (bare is not None and self._text.startswith(bare, self._at))

    @property
    def _may_be_mark(self) -> bool:
        return super()._may_be_mark or bool(self._keyed.openings.begun.fullmatch(self._text, self._at))


def _value(text: str, kind: str) -> str:
    """Returns the JSON of a value. It is a string if the text is no JSON, or if the type asks for that. Otherwise it is
    the text itself."""
    kinds = kind.split()
    if kinds == ["string"]:
        return _string(text)
    try:
        if kinds and {"array", "object"}.issuperset(kinds):
            text = _unescaped(text)
        found = json_of(text, is_kept=True)
        is_text = "string" in kinds and (isinstance(found, str) or kind_of(found) not in kinds)
        return _string(text) if is_text else text.strip()
    except (ValueError, RecursionError):
        named = None if "string" in kinds else _PYTHONS.get(text.strip().lower())
        return _string(text) if named is None else named


def _unescaped(text: str) -> str:
    """Returns the text without the escapes of a JSON string, if it is JSON then: some models write [{\\"id\\": 1}]."""
    try:
        found = json.loads(f'"{text}"', strict=False)
        json_of(found, is_kept=True)
    except (ValueError, RecursionError):
        return text
    return str(found)


_PYTHONS = {"true": "true", "false": "false", "none": "null"}


def _string(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def types_of(schemas: Mapping[str, Mapping[str, Any] | None]) -> dict[str, dict[str, str]]:
    """Returns the types of the tools' parameters. `schemas` are by tool name."""
    return {name: _types_in(schema or {}) for name, schema in schemas.items()}


def _types_in(schema: Mapping[str, Any]) -> dict[str, str]:
    document = Document(schema)
    properties = document.top.get("properties")
    if not isinstance(properties, dict):
        return {}
    return {name: _type_in(each, document) for name, each in properties.items()}


def _type_in(schema: Any, document: Document) -> str:
    """Returns the type. Several, separated by blanks, stand for a text or a value of the other types. Empty:
    unknown."""
    kinds = document.kinds(schema)
    if kinds == {"number", "integer"}:
        return "number"
    is_simple = len(kinds) == 1 or ("string" in kinds and kinds != ALL_KINDS)
    return " ".join(sorted(kinds)) if is_simple else ""
