"""Tool calls, in pieces: the name first, then the arguments as they come; and where both are in a model's text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Never

from alignedserve.gateway.tools.tags import Rest, beginnings, spelt

# The beginning of a call as templates write it, up to its arguments.
HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([a-zA-Z0-9_.-]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_NAME = re.compile("[a-zA-Z0-9_.-]+")
# The most characters of a head, so that a text that goes on without one is not searched again and again.
MAX_HEAD_CHARS = 1024


def _head(keys: Sequence[str]) -> list[str]:
    name = ['"', "[a-zA-Z0-9_.-]+", '"']
    tokens = [spelt("{"), *map(spelt, keys[:-1]), name, spelt(","), spelt(keys[-1]), spelt(":")]
    return [part for token in tokens for part in (*token, r"\s*")]


# What may become a head if there is more text.
HEAD_BEGUN = beginnings(
    *(
        _head([*kind, '"name"', ":", key])
        for kind in ([], ['"type"', ":", '"function"', ","])
        for key in ('"arguments"', '"parameters"')
    )
)


@dataclass
class Piece:
    """A piece with a `name` begins a call; one without it goes on with the last call."""

    name: str | None
    # The beginning of the JSON, as far as it has come.
    arguments: str = ""
    # The call's id where the model has written one; None: it gets one.
    id: str | None = None


@dataclass
class Content:
    """A piece of the text that answers."""

    text: str


@dataclass
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


ReadPart = Content | Thought | Piece


@dataclass
class Read:
    """What a reader has newly found, in the order in which the model has written it."""

    parts: list[ReadPart] = field(default_factory=list)

    @classmethod
    def of(cls, content: str) -> Read:
        read = cls()
        read.say(content)
        return read

    def say(self, content: str) -> None:
        self._add(Content, content)

    def think(self, thoughts: str) -> None:
        self._add(Thought, thoughts)

    def begin(self, name: str, arguments: str = "", call_id: str | None = None) -> None:
        self.parts.append(Piece(name, arguments, call_id))

    def go_on(self, arguments: str) -> None:
        """Goes on with the last call: nothing else has come since."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, Piece):
            last.arguments += arguments
        elif arguments:
            self.parts.append(Piece(None, arguments))

    def add(self, more: Read) -> None:
        for part in more.parts:
            match part:
                case Piece(None, arguments):
                    self.go_on(arguments)
                case Piece(str(name), arguments, call_id):
                    self.begin(name, arguments, call_id)
                case Content() | Thought():
                    self._add(type(part), part.text)

    def drop_thoughts(self) -> None:
        self.parts = [part for part in self.parts if not isinstance(part, Thought)]

    def _add(self, kind: type[Content | Thought], text: str) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, kind):
            last.text += text
        elif text:
            self.parts.append(kind(text))

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Content))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, Thought))

    @property
    def pieces(self) -> list[Piece]:
        return [part for part in self.parts if isinstance(part, Piece)]


class CollectedText:
    """A choice's thoughts, content and calls, put together from what was read bit by bit."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        # The names, and the parts of their arguments.
        self._calls: list[tuple[str, list[str]]] = []
        # The ids that the model has written.
        self.call_ids: list[str | None] = []

    def add(self, read: Read) -> int:
        """Returns the number of calls so far."""
        self._content.append(read.content)
        self._reasoning.append(read.reasoning)
        for piece in read.pieces:
            if piece.name is not None:
                self._calls.append((piece.name, []))
                self.call_ids.append(piece.id)
            self._calls[-1][1].append(piece.arguments)
        return len(self._calls)

    @property
    def content(self) -> str:
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[tuple[str, str]]:
        """Returns names and arguments."""
        return [(name, "".join(parts)) for name, parts in self._calls]


# The rest of a JSON string, with what comes after one.
_IN_STRING = r'[^"\\\x00-\x1f]*(?:\\.[^"\\\x00-\x1f]*)*'
STRING = Rest(
    re.compile(rf'{_IN_STRING}"\s{{0,64}}[,:\]}}]'), re.compile(rf'{_IN_STRING}(?:\\|"\s{{0,64}})?')
)


class Nesting:
    """Finds where a JSON object ends. A `<` outside of a string ends it too: JSON has none. With `is_strict`, so does
    a string that begins or ends where JSON has none: a quotation mark is missing, or there is one too many."""

    def __init__(self, depth: int = 0, *, is_strict: bool = False) -> None:
        self._depth = depth
        self._is_strict = is_strict
        self._is_string = False
        self._is_escaped = False
        # The last letter outside of strings that is no blank; the object's own bracket, if nothing has come yet.
        self._last = "{"

    def end(self, text: str, start: int, stop: int | None = None) -> int | None:
        """Reads `text` from `start` to `stop`, or its end, and returns where the object ends; None if it goes on."""
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
        """Whether a string has ended before this letter, or begins with it, in a place where JSON has none."""
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
    """Returns a call's arguments as the object that APIs and templates need. What is no JSON object is the value of a
    field of its own."""
    found = _object_in(text)
    return {"arguments": text} if found is None else found


def _object_in(text: str) -> dict[str, Any] | None:
    """Returns the JSON object that the text is, or that a JSON string in it is: some models and clients write the
    latter. No text is an object without fields."""
    if not text.strip():
        return {}
    found = _json_in(text)
    if isinstance(found, str):
        found = _json_in(found)
    return found if isinstance(found, dict) else None


def _json_in(text: str) -> Any:
    """Returns None for what is no JSON."""
    try:
        return json_of(text)
    except (ValueError, RecursionError):
        return None


def json_of(text: str, *, is_kept: bool = False) -> Any:
    """Returns the value that the text is in JSON. Raises ValueError and RecursionError for what is none, or can't be
    written in an answer: half of a surrogate pair, and numbers that JSON has not. Numbers that are too large for a
    float are JSON, but can't be written again: they are refused too, unless the text `is_kept` as it is."""
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
    """`values` are JSON, which stays as it is written."""
    fields = (f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in values.items())
    return f"{{{', '.join(fields)}}}"


def calls_in(text: str) -> list[tuple[str, str]]:
    """Returns names and arguments of the calls in a text that holds nothing else; otherwise, nothing."""
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
