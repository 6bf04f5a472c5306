"""Parses a model's text as it arrives, into content and calls.

A call is streamed from its name on, if name and arguments come in this order, as templates write them. A call in
another form is sent when it is complete. What was sent can't be taken back: arguments that end early, or are no JSON,
are sent as written, as OpenAI does.

The result does not depend on how the text is cut, and keeps its order. Each character is read a few times at most,
however long the text becomes, since a client may have provoked it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from alignedserve.gateway.tools.calls import Read
from alignedserve.gateway.tools.tags import Rest


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
