"""The shapes that the data of a chat takes on its way.

A shape is a type of record (dataclass, struct, pydantic model, named tuple), bytes, text, a list, or a dict with
certain keys. It counts if an argument or a result of a function has it and contains the chat: its prompt as text or as
ids, its key, or the text of its first token, in a field, or in a record or a collection within it.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Iterable, Mapping
from itertools import islice

import msgspec
from pydantic import BaseModel

# How deep in records and collections the content is looked for, and at how many items of each.
_MAX_DEPTH = 3
_MAX_ITEMS = 64
_PLAIN = (str, bytes, bytearray, list, tuple)


class Shapes:
    def __init__(self, texts: tuple[str, ...], prompt: list[int]) -> None:
        """`texts` are those of the prompt and of the first token; `prompt` has its ids. None occurs by chance."""
        self._texts = texts
        # The ids are packed where they travel between processes.
        packed = (array(code, prompt).tobytes() for code in "iq")
        self._encoded = (*(text.encode() for text in texts), *packed)
        self._prompt = prompt
        # Known from the first record that has a key beside the prompt's ids.
        self._key: int | None = None
        # where each was seen first
        self._found: dict[str, str] = {}

    def look(self, value: object, place: str) -> None:
        name = _shape(value)
        if name is not None and name not in self._found and self._is_in(value, _MAX_DEPTH):
            self._found[name] = place

    def names(self) -> list[str]:
        return [f"{name}: {place}" for name, place in sorted(self._found.items())]

    def _is_in(self, value: object, depth: int) -> bool:
        match value:
            case str():
                return any(text in value for text in self._texts)
            case bytes() | bytearray():
                return any(text in value for text in self._encoded)
            case bool() | None:
                return False
            case int():
                return value == self._key
            case list() | tuple() if list(value[: len(self._prompt)]) == self._prompt:
                return True
        if depth == 0:
            return False
        fields = _fields(value)
        if fields is not None:
            self._take_key(fields)
            return self._are_in(fields.values(), depth)
        if isinstance(value, Mapping):
            return self._are_in(value.values(), depth) or self._are_in(value, depth)
        return isinstance(value, list | tuple) and self._are_in(value, depth)

    def _are_in(self, values: Iterable[object], depth: int) -> bool:
        return any(self._is_in(each, depth - 1) for each in islice(values, _MAX_ITEMS))

    def _take_key(self, fields: Mapping[str, object]) -> None:
        key = fields.get("key")
        has_prompt = any(isinstance(each, list) and each == self._prompt for each in fields.values())
        if self._key is None and type(key) is int and has_prompt:
            self._key = key


def _shape(value: object) -> str | None:
    """Returns its name, or None for what has no shape, such as an object that is no record."""
    if isinstance(value, dict):
        keys = list(value)
        return f"dict of {', '.join(sorted(keys))}" if all(isinstance(key, str) for key in keys) else None
    if _fields(value) is not None:
        return f"{type(value).__module__}.{type(value).__qualname__}"
    return type(value).__name__ if isinstance(value, _PLAIN) else None


def _fields(value: object) -> Mapping[str, object] | None:
    """Returns a record's fields that are set, and None for what is no record."""
    match value:
        case type():
            return None
        case msgspec.Struct():
            names = value.__struct_fields__
        case BaseModel():
            return value.__dict__
        case tuple() if hasattr(value, "_fields"):
            names = value._fields
        case _ if dataclasses.is_dataclass(value):
            names = tuple(field.name for field in dataclasses.fields(value))
        case _:
            return None
    return {name: getattr(value, name) for name in names if hasattr(value, name)}
