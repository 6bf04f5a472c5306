"""A reader that goes through the text as it comes: text, the place where a call may begin, the call, what closes it,
and text again."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

from alignedserve.gateway.tools.calls import STRING, Nesting, Read
from alignedserve.gateway.tools.readers import Reader
from alignedserve.gateway.tools.tags import Rest


class Cursor(Reader):
    """Goes one step at a time. A step that needs more text than there is waits for it, so that what it does follows
    from the text alone.

    Blanks beside calls, with no other text between them, are no content: clients would show an empty message."""

    def __init__(self) -> None:
        # The text that has come; it has been processed up to `_at`.
        self._text = ""
        self._at = 0
        # The number of characters before `_text`.
        self._num_before = 0
        # What goes one step: returns False if more text is needed.
        self._phase: Callable[[Read], bool] = self._find
        # What may be the beginning of a call, and is content if it is none.
        self._opened: list[str] = []
        # Finds the end of the arguments that are being sent.
        self._arguments = Nesting()
        # Whether there is no more text, and whether it was not the model that ended it.
        self._is_ended = self._is_cut = False
        # The content that `read` has not got yet; the blanks since the last call, or the beginning; whether there were
        # only blanks.
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
        """Shows the text up to where a call may begin."""

    @abstractmethod
    def _open(self, read: Read) -> bool:
        """Begins the call that stands here, or gives up."""

    @abstractmethod
    def _close(self, read: Read) -> bool:
        """Goes past what closes a call whose arguments have ended."""

    def _send(self, read: Read) -> bool:
        """Goes on with the arguments of a call."""
        end = self._arguments.end(self._text, self._at)
        read.go_on(self._take(end))
        if end is not None:
            self._phase = self._close
        return end is not None

    def _take(self, end: int | None = None) -> str:
        """Takes the text up to `end`, or all there is."""
        start, self._at = self._at, len(self._text) if end is None else end
        return self._text[start : self._at]

    def _put_back(self, text: str) -> None:
        """`text` is what was taken last."""
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
        """A call may begin here if there is more text."""
        return self._is_ended and self._give_up()

    def _drop_rest(self) -> bool:
        """What stands here may be the beginning of what closes a call. If there is no more, it is not shown."""
        if self._is_ended:
            self._take()
        return False

    def _give_up(self) -> bool:
        """No call begins here."""
        self._show("".join(self._opened))
        self._opened.clear()
        self._phase = self._find
        return True
