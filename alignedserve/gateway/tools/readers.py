"""Parses a model's text as it arrives, into content and calls.

A call is streamed from its name on, if name and arguments come in this order, as templates write them. A call in
another form is sent when it is complete. What was sent can't be taken back: arguments that end early, or are no JSON,
are sent as written, as OpenAI does.

The result does not depend on how the text is cut, and keeps its order. Each character is read a few times at most,
however long the text becomes, since a client may have provoked it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field

from alignedserve.gateway.tools.tags import Rest


@dataclass
class CallPiece:
    """A piece with a `name` begins a call. One without it continues the last call."""

    name: str | None
    # The start of the JSON, as far as it has arrived.
    arguments: str = ""
    # The call's id, if the model has written one. None: it will get one.
    id: str | None = None


@dataclass
class ContentPiece:
    """A piece of the answer's text."""

    text: str


@dataclass
class ThoughtPiece:
    """A piece of the reasoning."""

    text: str


ReadPart = ContentPiece | ThoughtPiece | CallPiece


@dataclass
class Read:
    """The new parts that a reader has found, in the order in which the model has written them."""

    parts: list[ReadPart] = field(default_factory=list)

    @classmethod
    def of(cls, content: str) -> Read:
        read = cls()
        read.say(content)
        return read

    def say(self, content: str) -> None:
        self._add(ContentPiece, content)

    def think(self, thoughts: str) -> None:
        self._add(ThoughtPiece, thoughts)

    def begin(self, name: str, arguments: str = "", call_id: str | None = None) -> None:
        self.parts.append(CallPiece(name, arguments, call_id))

    def go_on(self, arguments: str) -> None:
        """Continues the last call, which must be the last part."""
        last = self.parts[-1] if self.parts else None
        if isinstance(last, CallPiece):
            last.arguments += arguments
        elif arguments:
            self.parts.append(CallPiece(None, arguments))

    def add(self, more: Read) -> None:
        for part in more.parts:
            match part:
                case CallPiece(None, arguments):
                    self.go_on(arguments)
                case CallPiece(str(name), arguments, call_id):
                    self.begin(name, arguments, call_id)
                case ContentPiece() | ThoughtPiece():
                    self._add(type(part), part.text)

    def drop_thoughts(self) -> None:
        self.parts = [part for part in self.parts if not isinstance(part, ThoughtPiece)]

    def _add(self, kind: type[ContentPiece | ThoughtPiece], text: str) -> None:
        last = self.parts[-1] if self.parts else None
        if isinstance(last, kind):
            last.text += text
        elif text:
            self.parts.append(kind(text))

    @property
    def content(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ContentPiece))

    @property
    def reasoning(self) -> str:
        return "".join(part.text for part in self.parts if isinstance(part, ThoughtPiece))

    @property
    def pieces(self) -> list[CallPiece]:
        return [part for part in self.parts if isinstance(part, CallPiece)]


class CollectedText:
    """The reasoning, content and calls of a choice, collected from what was read."""

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
        """Names and arguments."""
        return [(name, "".join(parts)) for name, parts in self._calls]


class Reader(ABC):
    """Parses the text of one choice."""

    # The finish reason that replaces "stop" if calls were made.
    stop_reason = "tool_calls"
    # Whether the text is inside reasoning. None: this reader does not separate reasoning.
    is_thinking: bool | None = None
    # Whether marks begin calls, so that calls within reasoning can be recognised.
    is_marked = False

    @property
    def open_text(self) -> Rest | None:
        """The rest of a string within a call, if one is open: a tag could be part of it."""
        return None

    @abstractmethod
    def feed(self, text: str) -> Read: ...

    @abstractmethod
    def end(self, *, is_cut: bool = False) -> Read:
        """Called at the end of the text. `is_cut`: a limit or stop string ended it, so unclosed parts are
        incomplete."""


class TextReader(Reader):
    """The whole text is content."""

    def feed(self, text: str) -> Read:
        return Read.of(text)

    def end(self, *, is_cut: bool = False) -> Read:
        return Read()


class NamedReader(Reader):
    """The whole text is the arguments of one call."""

    # OpenAI returns "stop" for a forced call.
    stop_reason = "stop"

    def __init__(self, name: str) -> None:
        self._name: str | None = name

    def feed(self, text: str) -> Read:
        read = Read()
        if self._name is not None:
            read.begin(self._name)
            self._name = None
        read.go_on(text)
        return read

    def end(self, *, is_cut: bool = False) -> Read:
        return self.feed("")
