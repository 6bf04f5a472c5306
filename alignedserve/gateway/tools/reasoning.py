"""Separates a model's reasoning from its answer, by tags that its chat template has, as for Qwen3 and DeepSeek-R1.

Some templates open the reasoning in the prompt, so the output has only the closing tag. With others the model opens it,
or answers at once. If reasoning is off, the template closes it in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from alignedserve.gateway.tools.readers import CollectedText, Read, Reader, TextReader
from alignedserve.gateway.tools.tags import overlap

# Known pairs of tags. A template has both if it strips the reasoning of earlier turns.
TAGS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("<reasoning>", "</reasoning>"))
# A closing tag within a call's string is part of the string if the string ends within this number of characters.
MAX_WAIT_CHARS = 1 << 10


class Thinking(msgspec.Struct, frozen=True):
    """How reasoning is marked in an output."""

    open: str
    close: str
    # Whether the prompt has opened it, and has some of its text.
    is_open: bool
    is_begun: bool = False


def thinking_of(template: str, prompt_end: str) -> Thinking | None:
    """Returns None if the output has no reasoning. `prompt_end` is the end of the prompt's text."""
    for opening, closing in TAGS:
        if closing in template:
            end = prompt_end.rstrip()
            return None if end.endswith(closing) else Thinking(opening, closing, end.endswith(opening))
    return None


class _Trail:
    """Holds back the blanks at the end of a text."""

    def __init__(self) -> None:
        self.blanks: list[str] = []

    def add(self, text: str) -> str:
        """Adds text. Returns what can be shown, which is all but the blanks at the end."""
        certain = text.rstrip()
        if not certain:
            self.blanks.append(text)
            return ""
        shown = "".join(self.blanks) + certain
        self.blanks = [text[len(certain) :]]
        return shown


class ReasoningReader(Reader):
    """Separates reasoning from the answer, which another reader parses.

    A call within reasoning that is closed later is a draft. If the model ends its output without closing the reasoning,
    calls in it count, and the rest is reasoning. A closing tag in a string within a call does not close the
    reasoning."""

    def __init__(self, thinking: Thinking, new_answer: Callable[[], Reader]) -> None:
        self._thinking = thinking
        self._answer = new_answer()
        self._is_thinking = thinking.is_open
        # Whether the reasoning has ended, or there is none.
        self._is_over = False
        # Blanks before the first text, and text that may be part of a tag and is not read yet.
        self._space: list[str] = []
        self._text = ""
        # Whether blanks are skipped: before the reasoning, and between reasoning and answer.
        self._skips_space = not thinking.is_begun
        # Finds calls within the reasoning.
        self._draft = new_answer() if self._answer.is_marked else TextReader()
        # Reasoning that is not shown, since a call may begin there or has begun; and what was parsed of it since the
        # first call.
        self._held: list[str] = []
        self._drafted = CollectedText()
        self._num_calls = 0
        self._trail = _Trail()

    @property
    def is_thinking(self) -> bool:  # type: ignore[override]
        return self._is_thinking

    @property
    def stop_reason(self) -> str:  # type: ignore[override]
        return self._answer.stop_reason

    def feed(self, text: str) -> Read:
        self._text += text
        read = Read()
        if not self._is_over and not self._is_thinking:
            self._open(is_end=False)
        if self._is_thinking:
            self._think(read)
        if self._is_over:
            self._pass_on(read)
        return read

    def end(self, *, is_cut: bool = False) -> Read:
        read = Read()
        if not self._is_over and not self._is_thinking:
            self._open(is_end=True)
        if self._is_thinking:
            self._think(read, is_end=True)
        if self._is_thinking and self._has_called(is_cut):
            read.think(self._trail.add(self._drafted.content))
            for (name, arguments), call_id in zip(self._drafted.calls, self._drafted.call_ids, strict=True):
                read.begin(name, arguments, call_id)
            return read
        if self._is_thinking:
            read.think("".join((*self._trail.blanks, *self._held)))
        else:
            self._pass_on(read)
        read.add(self._answer.end(is_cut=is_cut))
        return read

    def _has_called(self, is_cut: bool) -> bool:
        """Called if the output ends within reasoning. Returns whether calls in it count."""
        self._held.append(self._text)
        self._drafted.add(self._draft.feed(self._text))
        self._drafted.add(self._draft.end(is_cut=is_cut))
        return bool(self._drafted.calls) and not is_cut

    def _open(self, is_end: bool) -> None:
        """Decides whether the output opens reasoning."""
        tag, begun = self._thinking.open, self._text.lstrip()
        if begun.startswith(tag):
            self._is_thinking, self._text = True, begun[len(tag) :]
        elif is_end or not tag.startswith(begun):
            # It does not: the whole text is the answer, with the blanks before it.
            self._text = "".join(self._space) + self._text
            self._is_over, self._skips_space = True, False
        elif not begun:
            self._space.append(self._text)
            self._text = ""

    def _think(self, read: Read, *, is_end: bool = False) -> None:
        if self._skips_space and self._begins(is_end):
            self._skips_space = False
        if self._skips_space:
            return
        close = self._thinking.close
        while (place := self._text.find(close)) >= 0:
            self._consider(self._text[:place], read)
            self._text = self._text[place:]
            is_closing = self._is_closing(self._text[len(close) :], is_end)
            if is_closing is None:
                return
            self._text = self._text[len(close) :]
            if is_closing:
                read.think(self._trail.add("".join(self._held)))
                self._held.clear()
                self._is_thinking, self._is_over, self._skips_space = False, True, True
                return
            self._consider(close, read)
        end = len(self._text) - overlap(self._text, 0, close)
        self._consider(self._text[:end], read)
        self._text = self._text[end:]

    def _begins(self, is_end: bool) -> bool:
        """Skips blanks, and further opening tags: some models write the tag though the prompt has it, or write it
        twice. Returns whether the reasoning's own text begins."""
        tag = self._thinking.open
        self._text = self._text.lstrip()
        while self._text.startswith(tag):
            self._text = self._text[len(tag) :].lstrip()
        return bool(self._text) and (is_end or not tag.startswith(self._text))

    def _is_closing(self, after: str, is_end: bool) -> bool | None:
        """Returns whether the closing tag before `after` closes the reasoning, rather than being part of a string
        within a call. None: more text decides."""
        rest = self._draft.open_text
        if rest is None:
            return True
        if rest.whole.match(after[:MAX_WAIT_CHARS]):
            return False
        may_go_on = not is_end and len(after) < MAX_WAIT_CHARS and rest.begun.fullmatch(after)
        return None if may_go_on else True

    def _consider(self, text: str, read: Read) -> None:
        """Shows the reasoning up to the next possible call."""
        draft = self._draft.feed(text)
        self._held.append(text)
        if self._num_calls or draft.pieces:
            self._num_calls = self._drafted.add(draft)
        elif draft.content:
            held = "".join(self._held)
            read.think(self._trail.add(held[: len(draft.content)]))
            self._held = [held[len(draft.content) :]]

    def _pass_on(self, read: Read) -> None:
        if self._skips_space:
            self._text = self._text.lstrip()
            self._skips_space = not self._text
        text, self._text = self._text, ""
        if text:
            read.add(self._answer.feed(text))
