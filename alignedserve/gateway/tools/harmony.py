"""Parses the output of gpt-oss models: messages, each a header and a text between marks (OpenAI's harmony format).

    <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>

The prompt ends with `<|start|>assistant`, so the first header lacks its start. A header may name a recipient, before or
after its channel. The message is then a call:

    <|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>

The text of a message is reasoning (`analysis`), arguments of a call, or content (any other channel, or none).

No text is lost if marks are wrong. A header is over at the first character that no header can have there. If it has
named a channel, its message begins there, as if `<|message|>` had come. Otherwise it was no header, but text of the
message before it. A header without a text, because the output ends or another mark comes, is left out.

A model may also spell out a mark in its text, which can't be told from the mark. It stays in the text unless a header,
another mark or the end of the output follows it.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from alignedserve.gateway.tools.calls import Nesting
from alignedserve.gateway.tools.readers import Read, Reader
from alignedserve.gateway.tools.tags import beginnings, overlap, spelt
from alignedserve.structured_outputs import Thoughts

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
MARKS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
ANALYSIS = f"{CHANNEL}analysis{MESSAGE}"
FINAL = f"{CHANNEL}final{MESSAGE}"
# Marks by which a template shows the format.
SHOWN = (START, CHANNEL, MESSAGE)

_MARK = re.compile("|".join(map(re.escape, MARKS)))
_CHANNELS = ("analysis", "commentary", "final")
_FUNCTIONS = "functions."
_WORD = r"[\w.-]{0,80}"
# Matches a header, and every start of one if its marks are complete.
#
# A header is the end of the message before, a role, a recipient, a channel, a recipient, and the type of a call's text.
# After a call, models sometimes write a channel's name without any mark.
_BARE = beginnings(*map(spelt, _CHANNELS)).pattern
_HEADER = re.compile(
    rf"(?:<\|(?:end|return)\|>\s{{0,8}}|<\|call\|>\s{{0,8}}(?P<bare>{_BARE}))?"
    rf"(?:<\|start\|>{_WORD})? ?(?:t|to|to=(?P<early>{_WORD}) ?)?"
    rf"(?:<\|channel\|>(?P<channel>\w{{0,80}})(?: (?:t|to|to=(?P<late>{_WORD}))?)?"
    rf"(?(early) ?{_WORD})(?(late) ?{_WORD}))?(?:<\|constrain\|>{_WORD} ?)?",
    re.ASCII,
)
# The template accepts any effort; these map others to those that the models were trained with. They always reason.
_EFFORTS = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


def effort_of(asked: str | None) -> str | None:
    return _EFFORTS.get(asked, asked) if asked else asked


def thoughts_before(opening: str) -> Thoughts:
    """Returns the reasoning that may come before a structured output, which `opening` then opens."""
    return Thoughts(f"{ENDS[0]}{START}assistant", ANALYSIS, opening)


class HarmonyReader(Reader):
    """`tools` are the names of tools that may be called. Without any, a message to a tool is text of its channel."""

    def __init__(self, tools: Collection[str], stop_reason: str = "tool_calls") -> None:
        self.stop_reason = stop_reason
        self._tools = tools
        # The header so far. None inside a text.
        self._header: str | None = ""
        # The kind of the text: "reasoning", "content" or "call".
        self._kind = "content"
        # Whether the message has no text yet, and the kinds of earlier texts.
        self._is_new = True
        self._kinds: set[str] = set()
        # Finds the end of a call's arguments. None after their end.
        self._arguments: Nesting | None = None
        # The end of the received text, if it may be the start of a mark.
        self._held = ""

    @property
    def is_thinking(self) -> bool:  # type: ignore[override]
        return self._kind == "reasoning" and self._header is None

    def feed(self, text: str) -> Read:
        read, text, place = Read(), self._held + text, 0
        for mark in _MARK.finditer(text):
            self._text(text[place : mark.start()], read)
            self._mark(mark[0], read)
            place = mark.end()
        end = len(text) - max(overlap(text, place, mark) for mark in MARKS)
        self._text(text[place:end], read)
        self._held = text[end:]
        return read

    def end(self, *, is_cut: bool = False) -> Read:
        read = Read()
        self._text(self._held, read)
        self._held = ""
        self._drop_header(read)
        return read

    def _mark(self, mark: str, read: Read) -> None:
        if self._header is not None:
            if mark == MESSAGE:
                self._begin(self._header, read)
                return
            if _HEADER.fullmatch(self._header + mark):
                self._header += mark
                return
            self._drop_header(read)
        if mark in (CONSTRAIN, MESSAGE):
            self._say(mark, read)
        else:
            self._header = mark

    def _text(self, text: str, read: Read) -> None:
        if self._header is None:
            self._say(text, read)
            return
        for place, letter in enumerate(text):
            if not _HEADER.fullmatch(self._header + letter):
                self._leave_header(self._header, text[place:], read)
                return
            self._header += letter

    def _leave_header(self, header: str, text: str, read: Read) -> None:
        """Handles text that can't be part of the header."""
        found = _HEADER.fullmatch(header)
        assert found
        # Within a text, a channel mark alone is one that the model has spelled out.
        is_opened = not header.startswith(CHANNEL) or not self._kinds
        if is_opened and found["channel"] in _CHANNELS:
            has_more = found["early"] or found["late"] or CONSTRAIN in header
            self._begin(header, read)
            self._say(("" if has_more else header[found.end("channel") :]) + text, read)
        else:
            self._header = None
            if self._kind == "call" and self._arguments is None and header.startswith(ENDS[1]):
                # The call is over, and so is its mark: the following text is not part of the arguments.
                self._kind, self._is_new, header = "content", True, header.removeprefix(ENDS[1])
            self._say(header + text, read)

    def _drop_header(self, read: Read) -> None:
        header, self._header = self._header or "", None
        if "<|" not in header:
            # The output has begun without any mark.
            self._say(header, read)

    def _begin(self, header: str, read: Read) -> None:
        """Begins the text of the message with this header."""
        found = _HEADER.fullmatch(header)
        assert found
        self._header, self._is_new = None, True
        name = self._called(found["early"] or found["late"] or "")
        if name:
            self._kind, self._arguments = "call", Nesting()
            read.begin(name)
        else:
            channel = found["channel"] or found["bare"]
            self._kind = "reasoning" if channel == "analysis" else "content"

    def _called(self, recipient: str) -> str:
        """Returns the name of the tool. Empty: no tool is called."""
        if recipient in self._tools:
            return recipient
        return recipient.removeprefix(_FUNCTIONS) if self._tools and recipient.startswith(_FUNCTIONS) else ""

    def _say(self, text: str, read: Read) -> None:
        if not text:
            return
        if self._kind == "call":
            if self._arguments and self._arguments.end(text, 0) is not None:
                self._arguments = None
            read.go_on(text)
            return
        # Messages in the same field are paragraphs of it.
        gap = "\n\n" if self._is_new and self._kind in self._kinds else ""
        self._is_new = False
        self._kinds.add(self._kind)
        if self._kind == "reasoning":
            read.think(gap + text)
        else:
            read.say(gap + text)
