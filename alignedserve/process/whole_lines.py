"""Output of several threads in whole lines.

`print` writes a text and its end one after the other. What another thread flushes, or writes to the same terminal or
pipe, may come in between: Ray prints what its workers log from a thread of its own, and a reader who waits for a line
of ours would not find it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, TextIO


class WholeLines:
    """Holds back what a thread has written until its line ends, or that thread flushes it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = threading.local()
        # Python's own streams may lose or double what two threads write at once.
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        # Bytes are a TypeError, by which click finds out what kind of stream it is.
        whole, end, rest = text.rpartition("\n")
        if end:
            self._emit(f"{self._take()}{whole}{end}")
        self._begun.text = f"{self._take()}{rest}"
        return len(text)

    def writelines(self, lines: list[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        self._emit(self._take())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _take(self) -> str:
        text: str = getattr(self._begun, "text", "")
        self._begun.text = ""
        return text

    def _emit(self, text: str) -> None:
        with self._lock:
            if text:
                self._stream.write(text)
            self._stream.flush()


def write_whole_lines() -> None:
    """From here on, for stdout and stderr. Safe to repeat."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, WholeLines):
            setattr(sys, name, WholeLines(stream))
