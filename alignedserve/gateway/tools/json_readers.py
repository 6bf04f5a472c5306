"""Readers of calls that are JSON objects, alone or in lists, as the whole text or within it."""

from __future__ import annotations

import re
from collections.abc import Container

from alignedserve.gateway.tools.calls import HEAD, HEAD_BEGUN, MAX_HEAD_CHARS, STRING, Nesting, calls_in
from alignedserve.gateway.tools.cursor import Cursor
from alignedserve.gateway.tools.readers import Read
from alignedserve.gateway.tools.tags import Rest, Tags, overlap

# Blanks and brackets before a call, which may begin a list, and separators after one.
_BEFORE = re.compile(r"[\s\[]*")
_AFTER = re.compile(r"[\s,;\]}]*")
# The start of a list, at the end of a text.
_LIST = re.compile(r"\[[\s\[]{0,16}\Z")
_MAX_LIST_CHARS = 17
# The start of a possible call in text.
_BEGUN = re.compile(r'\{\s*(?:\Z|"(?:\Z|[nt]))')
# Longest call in another form, in characters. Such a call is held until its end, and read again if it is none. That
# takes 10 ms for this length, and a longer one is text. Once the same number of characters has been read again, no more
# calls in other forms are looked for.
MAX_OBJECT_CHARS = 1 << 15


class JsonCalls(Cursor):
    # Marks that open calls, and marks that close them and are no content. None: there are none.
    openings: Tags | None = None
    closings: Tags | None = None

    def __init__(self) -> None:
        super().__init__()
        # Finds the end of an object, which is a possible call in another form or encloses arguments that were sent.
        self._nesting = Nesting()
        self._object: list[str] = []
        self._num_object_chars = 0
        # No object before this place of the whole text is tried as a whole again.
        self._seen_to = 0
        # Characters of objects that were read again.
        self._num_dropped_chars = 0

    @property
    def open_text(self) -> Rest | None:
        if self._phase == self._go_on and self._nesting.is_in_string:
            return STRING
        return super().open_text

    def _may_call(self, name: str) -> bool:
        return True

    def _open(self, read: Read) -> bool:
        self._phase = self._open_json
        return True

    def _open_json(self, read: Read) -> bool:
        before = _BEFORE.match(self._text, self._at)
        assert before
        self._opened.append(self._take(before.end()))
        if self._is_empty:
            return self._wait()
        limit = self._at + MAX_HEAD_CHARS
        head = HEAD.match(self._text, self._at, limit)
        if head and self._may_call(head[1]):
            self._at, self._arguments = head.end(), Nesting()
            self._begin(read, head[1])
            self._phase = self._send
            return True
        if not head and len(self._text) < limit and HEAD_BEGUN.fullmatch(self._text, self._at):
            return self._wait()
        if self._text[self._at] != "{" or not self._takes_whole:
            return self._give_up()
        self._object, self._nesting = [self._take(self._at + 1)], Nesting(depth=1, is_strict=True)
        self._num_object_chars = 1
        self._phase = self._begin_object
        return True

    @property
    def _takes_whole(self) -> bool:
        """Whether a call in another form may begin here."""
        is_new = self._num_before + self._at >= self._seen_to
        return is_new and self._num_dropped_chars < MAX_OBJECT_CHARS

    def _give_up(self) -> bool:
        if self._text[self._at : self._at + 1] == "{":
            self._opened.append(self._take(self._at + 1))
        return super()._give_up()

    def _begin_object(self, read: Read) -> bool:
        """Reads the start of an object. Every call has a name, so a string has to come first."""
        blanks = len(self._text) - len(self._text[self._at :].lstrip())
        self._add(self._take(blanks))
        if self._is_empty and not self._is_ended:
            return False
        if self._text[self._at : self._at + 1] != '"':
            return self._drop_object()
        self._phase = self._go_on
        return True

    def _go_on(self, read: Read) -> bool:
        """Reads the rest of an object. A closing mark within a string is text."""
        room = max(0, MAX_OBJECT_CHARS - self._num_object_chars)
        stop = min(len(self._text), self._at + room)
        end = self._nesting.end(self._text, self._at, stop)
        self._add(self._take(stop if end is None else end))
        if end is None:
            is_long = self._num_object_chars >= MAX_OBJECT_CHARS
            return (self._is_ended or is_long) and self._drop_object()
        calls = calls_in("".join(self._object))
        for call in calls:
            self._begin(read, *call)
        if not calls:
            return self._drop_object()
        self._phase = self._after
        return True

    def _add(self, text: str) -> None:
        self._object.append(text)
        self._num_object_chars += len(text)

    def _drop_object(self) -> bool:
        """The object is no call, but there may be calls in it, and after what closes it."""
        text = "".join(self._object)
        closing = self.closings.whole.search(text) if self.closings else None
        num_seen = closing.start() if closing else len(text)
        self._seen_to = max(self._seen_to, self._num_before + self._at - len(text) + num_seen)
        self._num_dropped_chars += len(text)
        self._put_back(text)
        return self._give_up()

    def _close(self, read: Read) -> bool:
        """The arguments have ended, so the object around them has to end, too."""
        self._nesting, self._phase = Nesting(depth=1), self._skip
        return True

    def _skip(self, read: Read) -> bool:
        """Skips the rest of the object. A closing mark ends it even inside a string, which loses nothing."""
        start, stop = self._at, len(self._text)
        if self.closings and not self._is_ended:
            stop = self.closings.held(self._text, start)
        end = self._nesting.end(self._text, start, stop)
        closing = (
            self.closings.whole.search(self._text, start, stop if end is None else end)
            if self.closings
            else None
        )
        if closing:
            end = closing.start()
        self._take(stop if end is None else end)
        if end is not None:
            self._phase = self._after
        return end is not None

    def _after(self, read: Read) -> bool:
        """Continues after a call."""
        after = _AFTER.match(self._text, self._at)
        assert after
        self._at = after.end()
        closing = self.closings.whole.match(self._text, self._at) if self.closings else None
        if closing:
            self._at, self._phase = closing.end(), self._leave
            return True
        if self._is_empty or self._may_be_mark:
            return self._drop_rest()
        is_opening = self.openings and self.openings.whole.match(self._text, self._at)
        self._phase = self._open if self._may_open and not is_opening else self._find
        return True

    @property
    def _may_open(self) -> bool:
        """Whether another call may begin here."""
        return self._text[self._at] in "{["

    @property
    def _may_be_mark(self) -> bool:
        return any(
            tags.begun.fullmatch(self._text, self._at) for tags in (self.openings, self.closings) if tags
        )

    def _leave(self, read: Read) -> bool:
        """Skips the line breaks after a closing mark."""
        while self._text[self._at : self._at + 1] == "\n":
            self._at += 1
        if self._is_empty:
            return False
        self._phase = self._find
        return True


class JsonReader(JsonCalls):
    """Reads a call or a list of calls and the text after it, or plain text."""

    def __init__(self) -> None:
        super().__init__()
        self._phase = self._open

    def _find(self, read: Read) -> bool:
        self._show(self._take())
        return False


# Llama's mark before a call. It is neither content nor part of a call, and models often omit it.
_PYTHON_TAG = "<|python_tag|>"


class JsonInTextReader(JsonReader):
    """Also reads calls after some text, as small Llama models write them. Those have to be of known tools, since a text
    may show an example of a call."""

    def __init__(self, tools: Container[str]) -> None:
        super().__init__()
        self._tools = tools
        self._is_in_text = False
        # Text that may be the start of a mark.
        self._held = ""

    def feed(self, text: str) -> Read:
        *parts, last = (self._held + text).split(_PYTHON_TAG)
        end = len(last) - overlap(last, 0, _PYTHON_TAG)
        self._held = last[end:]
        return super().feed("".join(parts) + last[:end])

    def end(self, *, is_cut: bool = False) -> Read:
        self._text += self._held
        return super().end(is_cut=is_cut)

    def _may_call(self, name: str) -> bool:
        return not self._is_in_text or name in self._tools

    @property
    def _takes_whole(self) -> bool:
        return not self._is_in_text and super()._takes_whole

    def _find(self, read: Read) -> bool:
        self._is_in_text = True
        begun = _BEGUN.search(self._text, self._at)
        place = end = begun.start() if begun else len(self._text)
        first = _LIST.search(self._text, max(self._at, end - _MAX_LIST_CHARS), end)
        if begun is None:
            self._show(self._take(first.start() if first and not self._is_ended else end))
            return False
        self._show(self._take(first.start() if first else place))
        self._opened.append(self._take(place))
        self._phase = self._open
        return True
