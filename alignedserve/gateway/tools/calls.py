"""Calls in JSON, as models write them."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Never

from alignedserve.gateway.tools.tags import Rest, beginnings, spelt

# The start of a call as templates write it, up to its arguments.
HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([a-zA-Z0-9_.-]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME = re.compile("[a-zA-Z0-9_.-]+")
# Longest head, in characters. It bounds how often a text without a complete head is searched again.
MAX_HEAD_CHARS = 1024


def _head(keys: Sequence[str]) -> list[str]:
    name = ['"', "[a-zA-Z0-9_.-]+", '"']
    tokens = [spelt("{"), *map(spelt, keys[:-1]), name, spelt(","), spelt(keys[-1]), spelt(":")]
    return [part for token in tokens for part in (*token, r"\s*")]


# Matches text that may become a head.
HEAD_BEGUN = beginnings(
    *(
        _head([*kind, '"name"', ":", key])
        for kind in ([], ['"type"', ":", '"function"', ","])
        for key in ('"arguments"', '"parameters"')
    )
)


# The rest of a JSON string, and what follows it.
_IN_STRING = r'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*'
STRING = Rest(
    re.compile(rf'{_IN_STRING}"\s{{0,64}}[,:\]}}]'), re.compile(rf'{_IN_STRING}(?:\\|"\s{{0,64}})?')
)


class Nesting:
    """Finds the end of a JSON object. A `<` outside of strings ends it too, since JSON has none. With `is_strict`, so
    does a string that begins or ends in a wrong place, because a quotation mark is missing or superfluous."""

    def __init__(self, depth: int = 0, *, is_strict: bool = False) -> None:
        self._depth = depth
        self._is_strict = is_strict
        self._is_string = False
        self._is_escaped = False
        # The last character outside of strings that is no blank. At first, the object's own bracket.
        self._last = "{"

    def end(self, text: str, start: int, stop: int | None = None) -> int | None:
        """Reads `text` from `start` to `stop`, or to its end. Returns where the object ends. None: it continues."""
        for place in range(start, len(text) if stop is None else stop):
            letter = text[place]
            if self._is_string:
                self._in_string(letter)
            elif letter == "<" or (self._is_strict and self._is_odd(letter)):
                return place
            elif self._ends_with(letter):
                return place + 1
        return None

    @property
    def is_in_string(self) -> bool:
        return self._is_string

    def _is_odd(self, letter: str) -> bool:
        """Whether a string ends before this character, or begins at it, in a place where JSON has none."""
        if letter in " \t\n\r":
            return False
        last, self._last = self._last, letter
        return letter not in ",:]}" if last == '"' else letter == '"' and last not in "{[,:"

    def _in_string(self, letter: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif letter == "\\":
            self._is_escaped = True
        elif letter == '"':
            self._is_string = False

    def _ends_with(self, letter: str) -> bool:
        if letter == '"':
            self._is_string = True
        elif letter in "{[":
            self._depth += 1
        elif letter in "}]":
            self._depth -= 1
            return self._depth <= 0
        return False


def arguments_of(text: str) -> dict[str, Any]:
    """Returns a call's arguments as the object that APIs and templates need. If `text` is no JSON object, it becomes
    the value of a field "arguments"."""
    found = _object_in(text)
    return {"arguments": text} if found is None else found


def _object_in(text: str) -> dict[str, Any] | None:
    """Returns the JSON object in the text, also if it is inside a JSON string, as some models and clients write it.
    Blank text is an empty object. None: there is no object."""
    if not text.strip():
        return {}
    found = _json_in(text)
    if isinstance(found, str):
        found = _json_in(found)
    return found if isinstance(found, dict) else None


def _json_in(text: str) -> Any:
    """Returns None if the text is no JSON."""
    try:
        return json_of(text)
    except (ValueError, RecursionError):
        return None


def json_of(text: str, *, is_kept: bool = False) -> Any:
    """Returns the value of a JSON text. Raises ValueError or RecursionError if it is no JSON, or has half of a
    surrogate pair or a number that JSON lacks. Numbers too large for a float can't be written again, so they are
    refused, too, unless the text `is_kept` unchanged."""
    found = (DECODER if is_kept else _FINITE).decode(text)
    if "\\u" in text:
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is no JSON")


def _finite(text: str) -> float:
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text:.40} is too large")
    return found


DECODER = json.JSONDecoder(parse_constant=_refuse)
_FINITE = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite)


def object_of(values: Mapping[str, str]) -> str:
    """Returns the JSON object of these values, which are JSON and stay unchanged."""
    fields = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
    return f"{{{', '.join(fields)}}}"


def calls_in(text: str) -> list[tuple[str, str]]:
    """Returns names and arguments of the calls, if the text has nothing else. Otherwise, nothing."""
    found = _json_in(text)
    calls = [_call(each) for each in (found if isinstance(found, list) else [found])]
    return [call for call in calls if call] if all(calls) else []


def _call(found: Any) -> tuple[str, str] | None:
    match found:
        case {"name": str(name), "arguments": dict() | str() as given} | {
            "name": str(name),
            "parameters": dict() | str() as given,
        } if _NAME.fullmatch(name):
            arguments = _object_in(given) if isinstance(given, str) else given
            return None if arguments is None else (name, json.dumps(arguments, ensure_ascii=False))
    return None
