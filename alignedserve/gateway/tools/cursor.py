"""The base of readers that go through the text as it arrives: text before a call, the call, its closing marks, text
again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from alignedserve.gateway.tools.calls import STRING, Nesting
from alignedserve.gateway.tools.readers import Read, Reader
from alignedserve.gateway.tools.tags import Rest


class Cursor(Reader):
    """Advances step by step. A step that needs more text waits for it, so the result does not depend on how the text is
    cut.

    Blanks beside calls, without other text, are no content: clients would show an empty message."""

    def __init__(self) -> None:
        # Received text, which is processed up to `_at`.
        self._text = ""
        self._at = 0
        # Number of characters before `_text`.
        self._num_before = 0
        # The next step. It returns False if it needs more text.
        self._phase: Callable[[Read], bool] = self._find
        # Text that may be the start of a call, and is content otherwise.
        self._opened: list[str] = []
        # Finds the end of the arguments that are being sent.
        self._arguments = Nesting()
        # Whether the text has ended, and whether a limit, rather than the model, ended it.
        self._is_ended = self._is_cut = False
        # Content that `read` does not have yet; the blanks since the last call, or since the start; and whether there
        # were only blanks.
        self._content: list[str] = []
        self._blanks: list[str] = []
        self._is_blank = True
        self._has_calls = False

    @property
    def open_text(self) -> Rest | None:
        return STRING if self._phase == self._send and self._arguments.is_in_string else None

    def feed(self, text: str) -> Read:
        self._text += text
        return self._read()

    def end(self, *, is_cut: bool = False) -> Read:
        self._is_ended, self._is_cut = True, is_cut
        read = self._read()
        if not self._has_calls:
            read.say("".join(self._blanks))
        return read

    def _read(self) -> Read:
        read = Read()
        while self._phase(read):
            pass
        self._num_before += self._at
        self._text, self._at = self._text[self._at :], 0
        self._show_content(read)
        return read

    @abstractmethod
    def _find(self, read: Read) -> bool:
        """Shows the text up to the next possible call."""

    @abstractmethod
    def _open(self, read: Read) -> bool:
        """Begins the call at this place, or gives up."""

    @abstractmethod
    def _close(self, read: Read) -> bool:
        """Passes what closes a call after its arguments."""

    def _send(self, read: Read) -> bool:
        """Continues the arguments of a call."""
        end = self._arguments.end(self._text, self._at)
        read.go_on(self._take(end))
        if end is not None:
            self._phase = self._close
        return end is not None

    def _take(self, end: int | None = None) -> str:
        """Takes the text up to `end`, or all of it."""
        start, self._at = self._at, len(self._text) if end is None else end
        return self._text[start : self._at]

    def _put_back(self, text: str) -> None:
        """Puts back `text`, which was taken last."""
        if len(text) <= self._at:
            self._at -= len(text)
            return
        self._num_before += self._at - len(text)
        self._text, self._at = text + self._text[self._at :], 0

    @property
    def _is_empty(self) -> bool:
        return self._at == len(self._text)

    def _show(self, text: str) -> None:
        if self._is_blank:
            self._blanks.append(text)
            if not text.strip():
                return
            text, self._is_blank = "".join(self._blanks), False
            self._blanks.clear()
        self._content.append(text)

    def _show_content(self, read: Read) -> None:
        read.say("".join(self._content))
        self._content.clear()

    def _begin(self, read: Read, name: str, arguments: str = "", call_id: str | None = None) -> None:
        self._show_content(read)
        read.begin(name, arguments, call_id)
        self._opened.clear()
        self._blanks.clear()
        self._is_blank = self._has_calls = True

    def _wait(self) -> bool:
        """Waits for more text, which may begin a call here."""
        return self._is_ended and self._give_up()

    def _drop_rest(self) -> bool:
        """Waits for the rest of a closing mark that may begin here. It is not shown if the text ends before that."""
        if self._is_ended:
            self._take()
        return False

    def _give_up(self) -> bool:
        """No call begins here: shows the text as content."""
        self._show("".join(self._opened))
        self._opened.clear()
        self._phase = self._find
        return True
