"""Makes several threads write whole lines.

`print` writes a text and its line break separately. Output of another thread to the same terminal or pipe may come in
between: Ray prints its workers' logs from a thread. A reader that waits for one of our lines would miss it.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, TextIO


class WholeLines:
    """Holds back a thread's output until its line ends or the thread flushes it."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._begun = threading.local()
        # Python's streams may lose or duplicate concurrent writes.
        self._lock = threading.RLock()

    def write(self, text: str) -> int:
        # Bytes must raise TypeError: click uses that to detect the kind of stream.
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
    """Wraps stdout and stderr. Safe to repeat."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, WholeLines):
            setattr(sys, name, WholeLines(stream))
