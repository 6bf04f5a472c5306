"""Reads calls that begin with a mark, with text before and after them. DeepSeek, Kimi and newer Mistral models write a
name and its arguments. Hermes, Qwen, older Mistral models, Granite, Phi and Hunyuan write JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from alignedserve.gateway.tools.calls import MAX_HEAD_CHARS, Nesting
from alignedserve.gateway.tools.cursor import Cursor
from alignedserve.gateway.tools.json_readers import JsonCalls
from alignedserve.gateway.tools.readers import Read
from alignedserve.gateway.tools.tags import Tags, beginnings, spelt

BLANKS = re.compile(r"\s*")
NAME = "[a-zA-Z0-9_.-]+"
HERMES_OPEN, HERMES_CLOSE = "<tool_call>", "</tool_call>"


@dataclass(frozen=True)
class CallHead:
    """The text between a mark and the arguments. The group `name` is the name, and a group `id` the call's id."""

    whole: re.Pattern[str]
    # Matches text that may become a head.
    begun: re.Pattern[str]


@dataclass(frozen=True)
class Marks:
    # Marks that may begin a call, or the section of calls.
    openings: Sequence[str]
    # None: the calls are JSON, alone or in a list.
    head: CallHead | None = None
    # Marks after the arguments, which are no content.
    closings: Sequence[str] = ()
    # Those that may be special tokens, if not all.
    tokens: Sequence[str] = ()

    @cached_property
    def opening_tags(self) -> Tags:
        return Tags.of(*self.openings)

    @cached_property
    def closing_tags(self) -> Tags | None:
        return Tags.of(*self.closings) if self.closings else None


_SEP, _KIMI_ARGUMENTS = "<｜tool▁sep｜>", "<|tool_call_argument_begin|>"
DEEPSEEK = Marks(
    ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),
    CallHead(
        re.compile(rf"(?:function{_SEP})?(?P<name>{NAME})(?:{_SEP}|\s*```json)\s*(?=\{{)"),
        beginnings(
            [NAME, *spelt(_SEP), r"\s*"],
            [NAME, r"\s*", *spelt("```json"), r"\s*"],
            [*spelt(f"function{_SEP}"), NAME, *spelt(_SEP), r"\s*"],
            [*spelt(f"function{_SEP}"), NAME, r"\s*", *spelt("```json"), r"\s*"],
        ),
    ),
    ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
)
KIMI = Marks(
    ("<|tool_calls_section_begin|>", "<|tool_call_begin|>"),
    CallHead(
        # The index that makes a name an id is not always present.
        re.compile(
            rf"(?=(?P<id>{NAME}:\d+)?)(?:functions\.)?(?P<name>{NAME}?)(?::\d+)?"
            rf"\s*{re.escape(_KIMI_ARGUMENTS)}\s*(?=\{{)"
        ),
        beginnings(
            [NAME, r"\s*", *spelt(_KIMI_ARGUMENTS), r"\s*"],
            [NAME, ":", r"\d+", r"\s*", *spelt(_KIMI_ARGUMENTS), r"\s*"],
        ),
    ),
    ("<|tool_call_end|>", "<|tool_calls_section_end|>"),
)
MISTRAL = Marks(
    ("[TOOL_CALLS]",),
    CallHead(
        re.compile(rf"(?P<name>{NAME})(?:\[CALL_ID\](?P<id>{NAME}))?\[ARGS\]\s*(?=\{{)"),
        beginnings(
            [NAME, *spelt("[ARGS]"), r"\s*"],
            [NAME, *spelt("[CALL_ID]"), NAME, *spelt("[ARGS]"), r"\s*"],
        ),
    ),
)
MISTRAL_LIST = Marks(("[TOOL_CALLS]",))
HERMES = Marks((HERMES_OPEN,), None, (HERMES_CLOSE,))
_TOKENS = ("<|tool_call|>", "<|/tool_call|>")
GRANITE = Marks(("<|tool_call|>", HERMES_OPEN), None, ("<|/tool_call|>", HERMES_CLOSE), _TOKENS)
PHI = Marks(("<|tool_call|>", "functools"), None, ("<|/tool_call|>",), _TOKENS)
# Hunyuan's and Jamba's.
HUNYUAN = Marks(("<tool_calls>",), None, ("</tool_calls>",))


class Marked(Cursor):
    is_marked = True

    def __init__(self, marks: Marks) -> None:
        super().__init__()
        self._marks = marks

    def _find(self, read: Read) -> bool:
        tags = self._marks.opening_tags
        found = tags.whole.search(self._text, self._at)
        if found is None:
            self._show(self._take(None if self._is_ended else tags.held(self._text, self._at)))
            return False
        self._show(self._take(found.start()))
        self._opened.append(self._take(found.end()))
        self._phase = self._open
        return True


class MarkedListReader(Marked, JsonCalls):
    """Reads calls in JSON."""

    def __init__(self, marks: Marks) -> None:
        super().__init__(marks)
        self.openings, self.closings = marks.opening_tags, marks.closing_tags


class HermesReader(MarkedListReader):
    def __init__(self) -> None:
        super().__init__(HERMES)


class MarkedReader(Marked):
    """Reads calls that each have a head."""

    def __init__(self, marks: Marks, head: CallHead) -> None:
        super().__init__(marks)
        self._head = head
        # More that may precede a call: blanks, and the mark of a call in a section.
        self._more = re.compile(rf"(?:\s|{marks.opening_tags.whole.pattern})+")

    def _open(self, read: Read) -> bool:
        more = self._more.match(self._text, self._at)
        if more:
            self._opened.append(self._take(more.end()))
        head = self._head.whole.match(self._text, self._at, self._at + MAX_HEAD_CHARS)
        if head:
            self._at, self._arguments = head.end(), Nesting()
            self._begin(read, head["name"], call_id=head.groupdict().get("id"))
            self._phase = self._send
            return True
        begun = (self._head.begun, self._marks.opening_tags.begun)
        if len(self._text) - self._at < MAX_HEAD_CHARS and any(
            each.fullmatch(self._text, self._at) for each in begun
        ):
            return self._wait()
        return self._give_up()

    def _close(self, read: Read) -> bool:
        """Passes what closes a call, and blanks."""
        blanks = BLANKS.match(self._text, self._at)
        assert blanks
        self._at = blanks.end()
        tags = self._marks.closing_tags
        closing = tags.whole.match(self._text, self._at) if tags else None
        if closing:
            self._at = closing.end()
            return True
        if self._is_empty or (tags and tags.begun.fullmatch(self._text, self._at)):
            return self._drop_rest()
        self._phase = self._find
        return True


def marked_reader(marks: Marks) -> Cursor:
    return MarkedReader(marks, marks.head) if marks.head else MarkedListReader(marks)
