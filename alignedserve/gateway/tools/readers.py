"""Reads a model's text, while it is written: what of it is content, and what are calls.

A call is streamed from its name on if name and arguments come in this order, as templates write them; a call in
another form is sent when it is complete. What was sent can't be taken back: arguments that end in the middle, or are
no JSON, are sent as they were written, as OpenAI does.

However the text is cut, it is read in the same way, and what is found has the order in which it was written. Each
letter is read a few times at most, however long the text becomes: a client may have made the model write it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from alignedserve.gateway.tools.calls import Read
from alignedserve.gateway.tools.tags import Rest


class Reader(ABC):
    """Reads the text of one choice."""

    # The finish reason that replaces "stop" when calls were made.
    stop_reason = "tool_calls"
    # Whether the text is inside thoughts; None: this reader knows none.
    is_thinking: bool | None = None
    # Whether marks begin calls, so that these can be told from thoughts.
    is_marked = False

    @property
    def open_text(self) -> Rest | None:
        """The rest of a text within a call, if one is open: a tag could be a part of it."""
        return None

    @abstractmethod
    def feed(self, text: str) -> Read: ...

    @abstractmethod
    def end(self, *, is_cut: bool = False) -> Read:
        """The text has ended. With `is_cut` it was not the model that ended it: what is not closed is not whole."""


class TextReader(Reader):
    """All of the text is content."""

    def feed(self, text: str) -> Read:
        return Read.of(text)

    def end(self, *, is_cut: bool = False) -> Read:
        return Read()


class NamedReader(Reader):
    """All of the text is the arguments of one call."""

    # OpenAI returns "stop" for a call that had to be made.
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
