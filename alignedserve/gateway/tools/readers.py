"""Parses tool calls from a model's text, while it is written.

A call is streamed from its name on if name and arguments come in this order, as templates write them; a call in
another form is sent when it is complete. What was sent can't be taken back: arguments that end in the middle, or are
no JSON, are sent as they were written, as OpenAI does.

Each letter is read a few times at most, however long the text becomes: a client may have made the model write it.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

from alignedserve.gateway.tools.calls import HEAD, MAX_HEAD_CHARS, Nesting, Read, calls_in
from alignedserve.gateway.tools.overlap import overlap

HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"
# What stands between the calls in a list.
_BETWEEN = " \n\t\r[],;"
_BETWEEN_RUN = re.compile(r"[ \n\t\r\[\],;]*")


class Reader(ABC):
    """Reads the text of one choice."""

    # The finish reason that replaces "stop" when calls were made.
    stop_reason = "tool_calls"
    # Whether the text is inside thoughts; None: this reader knows none.
    is_thinking: bool | None = None
    # The marks with which calls begin, if they have one each.
    openings: Sequence[str] = ()

    @abstractmethod
    def feed(self, text: str) -> Read: ...

    @abstractmethod
    def end(self) -> Read:
        """The text has ended."""


class TextReader(Reader):
    """All of the text is content."""

    def feed(self, text: str) -> Read:
        return Read(text)

    def end(self) -> Read:
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

    def end(self) -> Read:
        return self.feed("")


class BlankReader(Reader):
    """Leaves out a content that is nothing but blanks before a call: clients would show an empty message."""

    def __init__(self, reader: Reader) -> None:
        self.openings = reader.openings
        self.stop_reason = reader.stop_reason
        self._reader = reader
        # The blanks that have come; None: the answer has begun.
        self._blanks: str | None = ""

    def feed(self, text: str) -> Read:
        return self._seen(self._reader.feed(text))

    def end(self) -> Read:
        read = self._seen(self._reader.end())
        if self._blanks and not read.pieces:
            read.content = self._blanks + read.content
        return read

    def _seen(self, read: Read) -> Read:
        if self._blanks is None:
            return read
        blanks = self._blanks + read.content
        is_blank = not blanks.strip()
        read.content = "" if is_blank else blanks
        self._blanks = blanks if is_blank and not read.pieces else None
        return read


class Cursor(Reader):
    """Goes through the text as it comes, one step at a time."""

    def __init__(self) -> None:
        # The text that has come; it has been processed up to `_at`.
        self._text = ""
        self._at = 0
        # Finds the end of the arguments that are being sent; None outside of arguments.
        self._arguments: Nesting | None = None

    def feed(self, text: str) -> Read:
        self._text, self._at = self._text[self._at :] + text, 0
        read = Read()
        while self._step(read):
            pass
        return read

    @abstractmethod
    def _step(self, read: Read) -> bool:
        """Goes one step. Returns False if more text is needed."""

    def _take(self, end: int | None = None) -> str:
        """Takes the text up to `end`, or all there is."""
        start, self._at = self._at, len(self._text) if end is None else end
        return self._text[start : self._at]

    def _until(self, *tags: str) -> tuple[str, bool]:
        """Takes the text before the first of the tags, and the tag. Returns the text, and whether there is a tag;
        without one it ends where one may begin."""
        places = [(self._text.find(tag, self._at), tag) for tag in tags]
        found = [(place, tag) for place, tag in places if place >= 0]
        if found:
            place, tag = min(found)
            before = self._take(place)
            self._at += len(tag)
            return before, True
        kept = max((overlap(self._text, self._at, tag) for tag in tags), default=0)
        return self._take(len(self._text) - kept), False

    def _begin_call(self, read: Read) -> bool:
        """Returns whether a call begins here."""
        head = HEAD.match(self._text, self._at, self._at + MAX_HEAD_CHARS)
        if head:
            read.begin(head[1])
            self._arguments, self._at = Nesting(), head.end()
        return head is not None

    @property
    def _may_begin_call(self) -> bool:
        """Whether a call might begin here if there were more text."""
        return len(self._text) - self._at < MAX_HEAD_CHARS

    def _go_on(self, arguments: Nesting, read: Read) -> bool:
        """Returns whether the arguments end in this text."""
        end = arguments.end(self._text, self._at)
        read.go_on(self._take(end))
        if end is not None:
            self._arguments = None
        return end is not None


# What may stand before the first call of a list.
_LIST = re.compile(r"\[\s{0,8}\Z")
_KEYS = ('"name"', '"type"')


class JsonReader(Cursor):
    """Reads a call, or a list of calls, and nothing else; or plain text. With `finds_calls`, a call may also come after
    some text, as small Llamas write it."""

    def __init__(self, finds_calls: bool = False) -> None:
        super().__init__()
        self._finds_calls = finds_calls
        self._is_text = False
        # Whether the text begins as JSON does.
        self._is_json = False
        self._has_calls = False
        # Finds the end of the object around arguments that have ended.
        self._around: Nesting | None = None
        # The text before `_text`, in which there was no call.
        self._before: list[str] = []
        # Whether no further call will be streamed from its name on.
        self._is_other = False

    def end(self) -> Read:
        rest = "".join(self._before) + self._take()
        if self._has_calls:
            rest = rest.strip(_BETWEEN)
        if self._arguments or self._around or not rest:
            return Read()
        read = Read()
        for name, arguments in calls_in(rest):
            read.begin(name, arguments)
        return read if read.pieces else Read(rest)

    def _step(self, read: Read) -> bool:
        if self._is_text and self._finds_calls:
            return self._find(read)
        if self._is_text:
            read.content += self._take()
            return False
        if self._is_other:
            self._before.append(self._take())
            return False
        if self._arguments:
            if not self._go_on(self._arguments, read):
                return False
            self._around = Nesting(depth=1)
        if self._around:
            end = self._around.end(self._text, self._at)
            self._take(end)
            if end is None:
                return False
            self._around = None
        return self._begin() or self._call(read)

    def _find(self, read: Read) -> bool:
        """Shows the text up to where a call may begin. Returns whether there is one, or there is more to look at."""
        place = self._text.find("{", self._at)
        if place < 0:
            # A list may begin here.
            last = _LIST.search(self._text, self._at)
            read.content += self._take(last.start() if last else None)
            return False
        first = _LIST.search(self._text, max(self._at, place - 9), place)
        read.content += self._take(first.start() if first else place)
        start, self._at = self._at, place
        if self._begin_call(read):
            self._is_text, self._has_calls = False, True
            self._is_json = True
            return True
        self._at = start
        if self._may_begin_call and self._may_name_one(place + 1):
            return False
        read.content += self._take(place + 1)
        return True

    def _may_name_one(self, start: int) -> bool:
        """Whether what stands behind a brace may go on as a call does."""
        rest = self._text[start:].lstrip()
        return any(rest.startswith(key) or key.startswith(rest) for key in _KEYS)

    def _begin(self) -> bool:
        """Returns whether the text has just been found to be plain text."""
        if self._is_json:
            return False
        rest = self._text[self._at :].lstrip()
        if rest:
            self._is_json = rest[0] in "{["
            self._is_text = not self._is_json
        if self._is_text:
            self._text, self._at = "".join(self._before) + self._take(), 0
            self._before.clear()
        return self._is_text

    def _call(self, read: Read) -> bool:
        between = _BETWEEN_RUN.match(self._text, self._at)
        assert between
        skipped = self._take(between.end())
        if not self._has_calls:
            self._before.append(skipped)
        if self._begin_call(read):
            self._has_calls = True
            self._before.clear()
            return True
        self._is_other = not self._may_begin_call
        return self._is_other


class HermesReader(Cursor):
    """Reads calls between tags, with text around them."""

    openings = (HERMES_OPEN,)

    def __init__(self) -> None:
        super().__init__()
        # Whether a line break comes between calls, which is no content.
        self._skips_breaks = False
        self._is_inside = False
        # The text inside the tag before `_text`, in which there is no call that is streamed from its name on.
        self._before: list[str] = []
        # Whether the arguments have ended, but the closing tag has not come.
        self._is_told = False

    def end(self) -> Read:
        text = "".join(self._before) + self._take()
        if self._arguments or self._is_told:
            return Read()
        return Read(HERMES_OPEN * self._is_inside + text)

    def _step(self, read: Read) -> bool:
        if self._arguments:
            self._is_told = self._go_on(self._arguments, read)
            return self._is_told
        if self._is_told:
            return self._skip()
        return self._inside(read) if self._is_inside else self._outside(read)

    def _outside(self, read: Read) -> bool:
        while self._skips_breaks and self._at < len(self._text):
            self._skips_breaks = self._text[self._at] == "\n"
            self._at += self._skips_breaks
        before, is_found = self._until(HERMES_OPEN)
        read.content += before
        self._is_inside = is_found
        return is_found

    def _inside(self, read: Read) -> bool:
        if not self._before:
            if self._begin_call(read):
                return True
            if self._may_begin_call and self._text.find(HERMES_CLOSE, self._at) < 0:
                return False
        before, is_found = self._until(HERMES_CLOSE)
        self._before.append(before)
        if not is_found:
            return False
        inside = "".join(self._before)
        self._before.clear()
        calls = calls_in(inside)
        for name, arguments in calls:
            read.begin(name, arguments)
        read.content += "" if calls else HERMES_OPEN + inside + HERMES_CLOSE
        self._leave(skips_breaks=bool(calls))
        return True

    def _skip(self) -> bool:
        _, is_found = self._until(HERMES_CLOSE)
        if is_found:
            self._leave(skips_breaks=True)
        return is_found

    def _leave(self, skips_breaks: bool) -> None:
        self._is_inside = self._is_told = False
        self._skips_breaks = skips_breaks
