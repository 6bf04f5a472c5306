"""Tool calls, in pieces: the name first, then the arguments as they come; and where both are in a model's text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Never

from alignedserve.gateway.tools.tags import beginnings, spelt

# The beginning of a call as templates write it, up to its arguments.
HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([a-zA-Z0-9_.-]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
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


class Nesting:
    """Finds where a JSON object ends. A `<` outside of a string ends it too: JSON has none."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_string = False
        self._is_escaped = False

    def end(self, text: str, start: int, stop: int | None = None) -> int | None:
        """Reads `text` from `start` to `stop`, or its end, and returns where the object ends; None if it goes on."""
        for place in range(start, len(text) if stop is None else stop):
            letter = text[place]
            if self._is_string:
                self._in_string(letter)
            elif letter == "<":
                return place
            elif self._ends_with(letter):
                return place + 1
        return None

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


def json_of(text: str) -> Any:
    """Returns the value that the text is in JSON. Raises ValueError and RecursionError for what is none, or can't be
    written in an answer: half of a surrogate pair, and numbers that JSON has not."""
    found = json.loads(text, parse_constant=_refuse)
    if "\\u" in text:
        json.dumps(found, ensure_ascii=False).encode()
    return found


def _refuse(constant: str) -> Never:
    raise ValueError(f"{constant} is no JSON")


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
        }:
            arguments = _object_in(given) if isinstance(given, str) else given
            return None if arguments is None else (name, json.dumps(arguments, ensure_ascii=False))
    return None
