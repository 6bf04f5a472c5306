"""A command in a pseudo-terminal, as a person has it in front of them."""

from __future__ import annotations

import os
import pty
import select
import signal
import sys
import time

LIMIT_S = 25.0
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    def __init__(self, *words: str) -> None:
        self.shown = ""
        self._num_seen = 0
        self._pid, self._fd = pty.fork()
        if self._pid == 0:
            os.environ["TERM"] = "dumb"
            # whoever runs the tests may ignore it, as shells do for what they run in the background
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.execv(sys.executable, [sys.executable, "-m", "alignedserve", *words])

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    def until(self, text: str) -> str:
        """What was shown up to it, since the last time."""
        deadline = time.monotonic() + LIMIT_S
        while (end := self.shown.find(text, self._num_seen)) < 0:
            assert select.select([self._fd], [], [], deadline - time.monotonic())[0], self.shown
            data = self._read()
            assert data, f"it ended before {text!r}: {self.shown}"
            self.shown += data
        found = self.shown[self._num_seen : end]
        self._num_seen = end + len(text)
        return found

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        while data := self._read():
            self.shown += data
        _, status = os.waitpid(self._pid, 0)
        os.close(self._fd)
        return os.waitstatus_to_exitcode(status)

    def _read(self) -> str:
        try:
            return os.read(self._fd, 65536).decode(errors="replace")
        except OSError:
            # that is how a terminal says that nobody is there any more
            return ""
