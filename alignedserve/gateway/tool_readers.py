"""From a model's text to tool calls, while it is written.

A call is told from its name on where name and arguments come in this order, as templates show them; one in another form
when it is whole. What was told can't be taken back: arguments that end in the middle, or are no JSON, go out as they
were written, as OpenAI's do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from alignedserve.gateway.tool_calls import HEAD, Nesting, Read, calls_in

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
# what stands around calls in a list of them
_BETWEEN = " \n\t\r[],;"


class Reader(ABC):
    """Of one choice."""

    # what "stop" is called when calls were made
    stop_reason = "tool_calls"

    @abstractmethod
    def feed(self, text: str) -> Read: ...

    @abstractmethod
    def end(self) -> Read:
        """There is no more text."""


class NamedReader(Reader):
    """All of it is the arguments."""

    # as OpenAI does for a call that had to be made
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

    def end(self) -> Read:
        return self.feed("")


class JsonReader(Reader):
    """A call, or a list of calls, and nothing else; or just text."""

    def __init__(self) -> None:
        self._text = ""
        self._is_text = False
        self._has_calls = False
        # of the arguments that are being told, and of the object around them
        self._arguments: Nesting | None = None
        self._around: Nesting | None = None

    def feed(self, text: str) -> Read:
        if self._is_text:
            return Read(text)
        read = Read()
        self._text += text
        while self._step(read):
            pass
        return read

    def end(self) -> Read:
        rest = self._text.strip(_BETWEEN) if self._has_calls else self._text
        if self._arguments or self._around or not rest:
            return Read()
        read = Read()
        for name, arguments in calls_in(rest):
            read.begin(name, arguments)
        return read if read.pieces else Read(rest)

    def _step(self, read: Read) -> bool:
        """False: more text is needed."""
        if self._arguments:
            return self._go_on(self._arguments, read)
        if self._around:
            _, self._around, self._text = self._around.cut(self._text)
            return not self._around
        if not self._has_calls and self._text.lstrip()[:1] not in ("", "{", "["):
            self._is_text = True
            read.content, self._text = self._text, ""
            return False
        return self._begin(read)

    def _begin(self, read: Read) -> bool:
        rest = self._text.lstrip(_BETWEEN)
        head = HEAD.match(rest)
        if head:
            read.begin(head[1])
            self._has_calls, self._arguments, self._text = True, Nesting(), rest[head.end() :]
        return head is not None

    def _go_on(self, arguments: Nesting, read: Read) -> bool:
        told, self._arguments, self._text = arguments.cut(self._text)
        read.go_on(told)
        if not self._arguments:
            self._around = Nesting(depth=1)
        return not self._arguments


class HermesReader(Reader):
    """Calls between tags, with text around them."""

    def __init__(self) -> None:
        self._text = ""
        # a line break between calls is no content
        self._skips_breaks = False
        self._is_inside = False
        # of the arguments that are being told
        self._arguments: Nesting | None = None
        # they are over; the tag's end is not there yet
        self._is_told = False

    def feed(self, text: str) -> Read:
        self._text += text
        read = Read()
        while self._step(read):
            pass
        return read

    def end(self) -> Read:
        text, self._text = self._text, ""
        if self._arguments or self._is_told:
            return Read()
        return Read(HERMES_OPEN * self._is_inside + text)

    def _step(self, read: Read) -> bool:
        """False: more text is needed."""
        if self._arguments:
            told, self._arguments, self._text = self._arguments.cut(self._text)
            read.go_on(told)
            self._is_told = not self._arguments
            return self._is_told
        if self._is_told:
            return self._skip()
        return self._inside(read) if self._is_inside else self._outside(read)

    def _outside(self, read: Read) -> bool:
        if self._skips_breaks:
            self._text = self._text.lstrip("\n")
            self._skips_breaks = not self._text
        before, tag, after = self._text.partition(HERMES_OPEN)
        if tag:
            read.content += before
            self._is_inside, self._text = True, after
            return True
        keep = len(self._text) - _overlap(self._text, HERMES_OPEN)
        read.content += self._text[:keep]
        self._text = self._text[keep:]
        return False

    def _inside(self, read: Read) -> bool:
        head, close = HEAD.match(self._text), self._text.find(HERMES_CLOSE)
        if head and not 0 <= close < head.end():
            read.begin(head[1])
            self._arguments, self._text = Nesting(), self._text[head.end() :]
            return True
        if close < 0:
            return False
        inside, _, rest = self._text.partition(HERMES_CLOSE)
        calls = calls_in(inside)
        for name, arguments in calls:
            read.begin(name, arguments)
        read.content += "" if calls else HERMES_OPEN + inside + HERMES_CLOSE
        self._leave(rest, skips_breaks=bool(calls))
        return True

    def _skip(self) -> bool:
        _, tag, rest = self._text.partition(HERMES_CLOSE)
        if not tag:
            self._text = self._text[len(self._text) - _overlap(self._text, HERMES_CLOSE) :]
            return False
        self._leave(rest, skips_breaks=True)
        return True

    def _leave(self, rest: str, skips_breaks: bool) -> None:
        self._is_inside = self._is_told = False
        self._text, self._skips_breaks = rest, skips_breaks


def _overlap(text: str, tag: str) -> int:
    """Letters at the end of `text` that may be the beginning of `tag`."""
    longest = min(len(text), len(tag) - 1)
    return next((size for size in range(longest, 0, -1) if text.endswith(tag[:size])), 0)
