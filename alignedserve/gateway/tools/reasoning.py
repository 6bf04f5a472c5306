"""What a model thinks before it answers: text between tags that its chat template knows, as Qwen3 and DeepSeek-R1 write
it.

Some templates open the thoughts in the prompt, and the output has the closing tag only; some let the model open them,
or answer at once; and a template that was told not to think closes them in the prompt.
"""

from __future__ import annotations

import msgspec

from alignedserve.gateway.tools.calls import Read
from alignedserve.gateway.tools.overlap import overlap
from alignedserve.gateway.tools.readers import Reader

# The tags of the models that are known. A template has both where it strips the thoughts of earlier turns.
TAGS = (("<think>", "</think>"), ("<seed:think>", "</seed:think>"), ("<reasoning>", "</reasoning>"))


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


class ReasoningReader(Reader):
    """Separates thoughts from what comes after them, which another reader reads."""

    def __init__(self, thinking: Thinking, answer: Reader) -> None:
        self._thinking = thinking
        self._answer = answer
        self._is_thinking = thinking.is_open
        # Whether the thoughts have ended, or there are none.
        self._is_over = False
        # The text that has come and is not read yet: it may be a part of a tag, or space beside one.
        self._text = ""
        # The thoughts from the first mark of a call on. They are a draft if the thoughts are closed later; otherwise
        # the model has left the closing tag out.
        self._held: list[str] = []
        # Whether space is skipped: before thoughts, and between thoughts and answer.
        self._skips_space = True

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

    def end(self) -> Read:
        read = Read()
        if not self._is_over and not self._is_thinking:
            self._open(is_end=True)
        if self._is_thinking:
            return self._last_thoughts()
        self._pass_on(read)
        read.add(self._answer.end())
        return read

    def _last_thoughts(self) -> Read:
        """The output has ended, and its thoughts are still open: a call in them is one."""
        text = "".join(self._held) + self._text
        if not self._held:
            read = Read(reasoning=text)
            read.add(self._answer.end())
            return read
        answer = self._answer.feed(text.lstrip())
        answer.add(self._answer.end())
        return answer if answer.pieces else Read(reasoning=text)

    def _open(self, is_end: bool) -> None:
        """Decides whether the output opens thoughts."""
        tag, begun = self._thinking.open, self._text.lstrip()
        if begun.startswith(tag):
            self._is_thinking, self._text = True, begun[len(tag) :]
        elif is_end or not tag.startswith(begun):
            # It does not: all of the text is the answer, the space before it too.
            self._is_over, self._skips_space = True, False

    def _think(self, read: Read) -> None:
        if self._skips_space:
            self._text = self._text.lstrip()
            self._skips_space = not self._text
        place = self._text.find(self._thinking.close)
        if place >= 0:
            read.reasoning += ("".join(self._held) + self._text[:place]).rstrip()
            self._text = self._text[place + len(self._thinking.close) :]
            self._held.clear()
            self._is_thinking, self._is_over, self._skips_space = False, True, True
        elif self._held:
            self._hold(len(self._text) - overlap(self._text, 0, self._thinking.close))
        else:
            self._show(read)

    def _show(self, read: Read) -> None:
        """Shows the thoughts up to where a call may begin."""
        marks = self._answer.openings
        calls = [place for place in map(self._text.find, marks) if place >= 0]
        # What may be the beginning of a tag is kept, and the space before it, which would be the thoughts' last.
        kept = max(overlap(self._text, 0, tag) for tag in (self._thinking.close, *marks))
        certain = self._text[: min(calls, default=len(self._text) - kept)].rstrip()
        read.reasoning += certain
        self._text = self._text[len(certain) :]
        if calls:
            self._hold(len(self._text) - overlap(self._text, 0, self._thinking.close))

    def _hold(self, end: int) -> None:
        self._held.append(self._text[:end])
        self._text = self._text[end:]

    def _pass_on(self, read: Read) -> None:
        if self._skips_space:
            self._text = self._text.lstrip()
            self._skips_space = not self._text
        text, self._text = self._text, ""
        if text:
            read.add(self._answer.feed(text))
