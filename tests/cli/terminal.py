"""A command in a pseudo-terminal, as a user sees it."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import termios
import time

# less than a scenario may take (tests/playing.py), so that a failure shows the screen
LIMIT_S = 90.0
# Seconds of silence after which a key is typed again. A second Ctrl-C would end what the first one has only
# interrupted.
PATIENCE_S = 15.0
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    def __init__(self, *words: str, term: str = "dumb", size: tuple[int, int] | None = None) -> None:
        """`size` is (lines, columns)."""
        self.shown = ""
        self._num_seen = 0
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.environ["TERM"] = term
            if size:
                termios.tcsetwinsize(0, size)
            # It may be ignored when the tests run: shells do so for background commands.
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, "-m", "alignedserve", *words])

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str, again: str = "") -> str:
        """Returns what was shown up to and including `text`, since the last call.

        `again`: typed once more if nothing is shown. Python misses a Ctrl-C that comes just before it waits for a key
        or the network, until something else comes.
        """
        deadline = time.monotonic() + LIMIT_S
        while (end := self.shown.find(text, self._num_seen)) < 0:
            assert self._hear(again, deadline), f"it ended before {text!r}: {self.shown}"
        found = self.shown[self._num_seen : end]
        self._num_seen = end + len(text)
        return found

    def end(self, again: str = "") -> int:
        """Returns its exit code once it has ended by itself."""
        deadline = time.monotonic() + LIMIT_S
        while self._hear(again, deadline):
            pass
        _, status = os.waitpid(self._pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)

    def _hear(self, again: str, deadline: float) -> bool:
        """Returns False when it has ended."""
        while not select.select([self._fd], [], [], PATIENCE_S)[0]:
            assert time.monotonic() < deadline, self.shown
            self.type(again)
        # A screen that is drawn again and again is never silent.
        assert time.monotonic() < deadline, self.shown
        data = self._read()
        self.shown += data
        return bool(data)

    def _read(self) -> str:
        try:
            return os.read(self._fd, 65536).decode(errors="replace")
        except OSError:
            # This is how a terminal reports that no process has it open.
            return ""
