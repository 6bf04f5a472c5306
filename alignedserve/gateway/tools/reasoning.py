"""What a model thinks before it answers: text between tags that its chat template knows, as Qwen3 and DeepSeek-R1 write
it.

Some templates open the thoughts in the prompt, and the output has the closing tag only; some let the model open them,
or answer at once; and a template that was told not to think closes them in the prompt.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from alignedserve.gateway.tools.calls import CollectedText, Read
from alignedserve.gateway.tools.readers import Reader, TextReader
from alignedserve.gateway.tools.tags import overlap

# The tags of the models that are known. A template has both where it strips the thoughts of earlier turns.
TAGS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("<reasoning>", "</reasoning>"))
# A closing tag in a text within a call is a part of the text if the text ends within this number of characters.
MAX_WAIT_CHARS = 1 << 10


class Thinking(msgspec.Struct, frozen=True):
    """How the thoughts of an output are marked."""

    open: str
    close: str
    # Whether the prompt has opened them.
    is_open: bool


def thinking_of(template: str, prompt_end: str) -> Thinking | None:
    """`prompt_end` is the last text of the prompt. Returns None if the output has no thoughts."""
    for opening, closing in TAGS:
        if closing in template:
            end = prompt_end.rstrip()
            return None if end.endswith(closing) else Thinking(opening, closing, end.endswith(opening))
    return None


class _Trail:
    """Holds the blanks at the end of a text back."""

    def __init__(self) -> None:
        self.blanks: list[str] = []

    def add(self, text: str) -> str:
        """Returns what is not at the end any more, or no blank."""
        certain = text.rstrip()
        if not certain:
            self.blanks.append(text)
            return ""
        shown = "".join(self.blanks) + certain
        self.blanks = [text[len(certain) :]]
        return shown


class ReasoningReader(Reader):
    """Separates thoughts from what comes after them, which another reader reads.

    A call in thoughts that are closed later is a draft. If the model ends them without closing them, calls in them are
    calls, and what else there is are thoughts. A closing tag in a text within a call closes nothing."""

    def __init__(self, thinking: Thinking, new_answer: Callable[[], Reader]) -> None:
        self._thinking = thinking
        self._answer = new_answer()
        self._is_thinking = thinking.is_open
        # Whether the thoughts have ended, or there are none.
        self._is_over = False
        # The blanks before the first text, and the text that has come and is not read yet: it may be a part of a tag.
        self._space: list[str] = []
        self._text = ""
        # Whether space is skipped: before thoughts, and between thoughts and answer.
        self._skips_space = True
        # Reads the thoughts, for calls in them.
        self._draft = new_answer() if self._answer.is_marked else TextReader()
        # The thoughts that are not shown, since a call may begin there, or has begun; and what was read of them since
        # the first call.
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
        """The output has ended in thoughts. Returns whether calls in them are calls."""
        self._held.append(self._text)
        self._drafted.add(self._draft.feed(self._text))
        self._drafted.add(self._draft.end(is_cut=is_cut))
        return bool(self._drafted.calls) and not is_cut

    def _open(self, is_end: bool) -> None:
        """Decides whether the output opens thoughts."""
        tag, begun = self._thinking.open, self._text.lstrip()
        if begun.startswith(tag):
            self._is_thinking, self._text = True, begun[len(tag) :]
        elif is_end or not tag.startswith(begun):
            # It does not: all of the text is the answer, the space before it too.
            self._text = "".join(self._space) + self._text
            self._is_over, self._skips_space = True, False
        elif not begun:
            self._space.append(self._text)
            self._text = ""

    def _think(self, read: Read, *, is_end: bool = False) -> None:
        if self._skips_space:
            self._text = self._text.lstrip()
            self._skips_space = not self._text
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

    def _is_closing(self, after: str, is_end: bool) -> bool | None:
        """Returns whether the closing tag that stands before `after` closes the thoughts, or is a part of a text within
        a call in them. None: more text decides."""
        rest = self._draft.open_text
        if rest is None:
            return True
        if rest.whole.match(after[:MAX_WAIT_CHARS]):
            return False
        may_go_on = not is_end and len(after) < MAX_WAIT_CHARS and rest.begun.fullmatch(after)
        return None if may_go_on else True

    def _consider(self, text: str, read: Read) -> None:
        """Shows the thoughts up to where a call may begin."""
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
