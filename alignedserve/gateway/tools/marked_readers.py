"""Parses calls that begin with a mark: a name and its arguments, as DeepSeek, Kimi and newer Mistral models write them,
or a list of calls, as older Mistral models, Granite, Phi and Hunyuan do. Text may come before the first mark."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.gateway.tools.calls import MAX_HEAD_CHARS, Nesting, Read
from alignedserve.gateway.tools.overlap import overlap
from alignedserve.gateway.tools.readers import Cursor, JsonReader

NAME = "[a-zA-Z0-9_.-]+"


@dataclass(frozen=True)
class Marks:
    # Each of them may begin a call, or the section in which calls are.
    openings: Sequence[str]
    # What comes between them and the arguments; its group is the name. None: the calls are JSON, alone or in a list.
    head: re.Pattern[str] | None = None
    # What comes after the arguments, and is no content.
    closings: Sequence[str] = ()


DEEPSEEK = Marks(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    re.compile(rf"(?:function<｜tool▁sep｜>)?({NAME})(?:<｜tool▁sep｜>|\s*```json)\s*(?=\{{)"),
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
KIMI = Marks(
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    re.compile(rf"(?:functions\.)?({NAME}?)(?::\d+)?\s*<\|tool_call_argument_begin\|>\s*(?=\{{)"),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
MISTRAL = Marks(("[TOOL_CALLS]",), re.compile(rf"({NAME})(?:\[CALL_ID\]{NAME})?\[ARGS\]\s*(?=\{{)"))
MISTRAL_LIST = Marks(("[TOOL_CALLS]",))
GRANITE = Marks(("<|tool_call|>", "<tool_call>"), None, ("<|/tool_call|>", "</tool_call>"))
PHI = Marks(("<|tool_call|>", "functools"), None, ("<|/tool_call|>",))
HUNYUAN = Marks(("<tool_calls>",), None, ("</tool_calls>",))


class MarkedReader(Cursor):
    """Reads calls that have a head each."""

    def __init__(self, marks: Marks, head: re.Pattern[str]) -> None:
        super().__init__()
        self.openings = marks.openings
        self._marks = marks
        self._head = head
        # The opening marks of the call that may begin here; None outside of calls.
        self._opened: str | None = None
        # Whether a call has ended, and its closing marks may follow.
        self._is_closing = False

    def end(self) -> Read:
        text = self._take()
        if self._arguments or self._is_closing:
            return Read()
        return Read((self._opened or "") + text)

    def _step(self, read: Read) -> bool:
        if self._arguments:
            self._is_closing = self._go_on(self._arguments, read)
            return self._is_closing
        if self._is_closing:
            return self._close()
        return self._outside(read) if self._opened is None else self._inside(read)

    def _outside(self, read: Read) -> bool:
        places = [(self._text.find(mark, self._at), mark) for mark in self._marks.openings]
        found = [(place, mark) for place, mark in places if place >= 0]
        if not found:
            kept = max(overlap(self._text, self._at, mark) for mark in self._marks.openings)
            read.content += self._take(len(self._text) - kept)
            return False
        place, mark = min(found)
        read.content += self._take(place)
        self._opened = self._take(place + len(mark))
        return True

    def _inside(self, read: Read) -> bool:
        mark = next((each for each in self._marks.openings if self._text.startswith(each, self._at)), None)
        if mark or self._text[self._at : self._at + 1].isspace():
            self._opened = (self._opened or "") + self._take(self._at + len(mark or " "))
            return True
        head = self._head.match(self._text, self._at, self._at + MAX_HEAD_CHARS)
        if head:
            read.begin(head[1])
            self._arguments, self._at, self._opened = Nesting(), head.end(), None
            return True
        if len(self._text) - self._at < MAX_HEAD_CHARS:
            return False
        # It was no call.
        read.content += self._opened or ""
        self._opened = None
        return True

    def _close(self) -> bool:
        """Skips what closes a call. Returns whether anything else follows, which may be the next call."""
        rest = self._text[self._at :].lstrip()
        self._at = len(self._text) - len(rest)
        for mark in self._marks.closings:
            if rest.startswith(mark):
                self._take(self._at + len(mark))
                return True
        if not rest or any(mark.startswith(rest) for mark in self._marks.closings):
            return False
        self._is_closing = False
        return True


class MarkedListReader(Cursor):
    """Reads calls in JSON, alone or in a list, after a mark. What follows the closing mark is content."""

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self.openings = marks.openings
        self._marks = marks
        self._inside: JsonReader | None = None

    def end(self) -> Read:
        read, text = Read(), self._take()
        if self._inside is None:
            return Read(text)
        read.add(self._inside.feed(text))
        read.add(self._inside.end())
        return read

    def _step(self, read: Read) -> bool:
        if self._inside is None:
            before, is_found = self._until(*self._marks.openings)
            read.content += before
            if is_found:
                self._inside = JsonReader()
            return is_found
        calls, is_found = self._until(*self._marks.closings)
        read.add(self._inside.feed(calls))
        if is_found:
            read.add(self._inside.end())
            self._inside = None
        return is_found


def marked_reader(marks: Marks) -> Cursor:
    return MarkedReader(marks, marks.head) if marks.head else MarkedListReader(marks)
