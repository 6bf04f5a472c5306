"""Tool calls, in pieces: the name first, then the arguments as they come; and where both are in a model's text."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

# of a call as templates show it, up to where the arguments begin
HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([a-zA-Z0-9_.-]+)"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)


@dataclass
class Piece:
    """`name`: a call begins; None: the last one goes on."""

    name: str | None
    # JSON, as far as it goes
    arguments: str = ""


@dataclass
class Read:
    """What is new."""

    content: str = ""
    pieces: list[Piece] = field(default_factory=list)

    def begin(self, name: str, arguments: str = "") -> None:
        self.pieces.append(Piece(name, arguments))

    def go_on(self, arguments: str) -> None:
        if not arguments:
            return
        if self.pieces:
            self.pieces[-1].arguments += arguments
        else:
            self.pieces.append(Piece(None, arguments))

    def add(self, more: Read) -> None:
        self.content += more.content
        for piece in more.pieces:
            if piece.name is None:
                self.go_on(piece.arguments)
            else:
                self.pieces.append(piece)


class Nesting:
    """Where a JSON object ends. A `<` that is in no string ends it too: there is none in JSON."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._is_string = False
        self._is_escaped = False

    def cut(self, text: str) -> tuple[str, Nesting | None, str]:
        """Of `text` what belongs to it; itself, unless it ended; what follows."""
        for place, letter in enumerate(text):
            if self._is_string:
                self._in_string(letter)
            elif letter == "<":
                return text[:place], None, text[place:]
            elif self._ends_with(letter):
                return text[: place + 1], None, text[place + 1 :]
        return text, self, ""

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


def calls_in(text: str) -> list[tuple[str, str]]:
    """Names and arguments. None where there is anything else in it."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return []
    calls = [_call(each) for each in (found if isinstance(found, list) else [found])]
    return [call for call in calls if call] if all(calls) else []


def _call(found: Any) -> tuple[str, str] | None:
    match found:
        case {"name": str(name), "arguments": dict(arguments)} | {
            "name": str(name),
            "parameters": dict(arguments),
        }:
            return name, json.dumps(arguments, ensure_ascii=False)
    return None
