"""The format of what `serve` prints: each line has a time, or is a JSON object.

Three kinds of text arrive on the launcher's stdout and stderr:
- the launcher's own lines, which have no time yet;
- lines of other processes, which Ray forwards. It puts a prefix such as `(DecodeActor pid=7)` before each. Those that
  are written by process/logs.py have the right format already, and lose the prefix;
- everything else: what libraries print, Ray's reports and tracebacks.

A line that has not ended after SHOW_S seconds is shown all the same: it may be a question, or the progress of a
download. Carriage returns overwrite what precedes them in the line.

Ray would also colour lines, and count similar lines of several processes instead of printing them. Two variables of the
environment turn that off (ray_cluster.py).
"""

from __future__ import annotations

import atexit
import contextlib
import json
import re
import sys
import threading
import time
from dataclasses import dataclass
from typing import Any, TextIO

from alignedserve.process.logs import MAX_CHARS, one_line, time_of
from alignedserve.process.whole_lines import WholeLines
from alignedserve.types import shortened

LAUNCHER = "launcher"
# how click begins the line about an error that ends the command
_ERROR = "Error: "
# seconds that a line has to end
SHOW_S = 1.0
_FORWARDED = re.compile(r"\((?:(\S+) )?(?:pid=(\d+)|(raylet|autoscaler)[^,)]*)(?:, ip=([^)]*))?\) ?")
_HAS_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")
_OBJECT = '{"time": "'
# text mode: lines of an exception belong to the line above them
_INDENT = "    "
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Ray repeats these at length. The launcher prints one line instead.
_UNWANTED = re.compile(
    r"A worker died or was killed while executing a task|Task .* failed\. There are .* retries remaining"
)


class Alarm(str):
    """A line of the launcher about something that failed or ended by itself. Its level is warning."""


@dataclass(eq=False)
class _Begun:
    """A thread's line that has not ended."""

    text: str = ""
    # when its first character was written
    since_s: float = 0.0
    # whether a timer will look at it
    is_watched: bool = False


class FormattedLines(WholeLines):
    """Writes whole lines in one of logs.FORMATS. A line that has not ended is held back for SHOW_S seconds, also if it
    is flushed."""

    def __init__(self, stream: TextIO, form: str, level: str) -> None:
        """`level` is the level of the launcher's own lines in JSON."""
        super().__init__(stream)
        self._form = form
        self._level = level
        # lines of all threads that have not ended, in the order in which they were begun
        self._open: dict[_Begun, None] = {}
        self._is_finished = False

    def write(self, text: str) -> int:
        whole, end, rest = text.rpartition("\n")
        begun = self._own
        with self._lock:
            if end:
                self._emit(f"{self._take_from(begun)}{whole}{end}")
            if rest:
                self._begin(begun, rest)
            if self._is_finished:
                self.finish()
        return len(text)

    def flush(self) -> None:
        """Lines that have ended are written already. A timer shows the others."""

    def finish(self) -> None:
        """Writes what threads have begun. From here on nothing is held back, because the process is about to exit."""
        with self._lock:
            self._is_finished = True
            for begun in list(self._open):
                self._emit(self._take_from(begun))

    @property
    def _own(self) -> _Begun:
        """The line that this thread has begun."""
        found: _Begun | None = getattr(self._begun, "line", None)
        if found is None:
            found = self._begun.line = _Begun()
        return found

    def _begin(self, begun: _Begun, text: str) -> None:
        if not begun.text:
            begun.since_s = time.monotonic()
            self._open[begun] = None
        begun.text += text
        if not begun.is_watched and not self._is_finished:
            self._watch(begun, SHOW_S)

    def _watch(self, begun: _Begun, seconds: float) -> None:
        timer = threading.Timer(seconds, self._show, [begun])
        timer.daemon = True
        # While Python ends, no thread can be started.
        with contextlib.suppress(RuntimeError):
            timer.start()
            begun.is_watched = True

    def _show(self, begun: _Begun) -> None:
        """Writes a line that was begun SHOW_S seconds ago."""
        with self._lock:
            begun.is_watched = False
            if not begun.text:
                return
            left_s = begun.since_s + SHOW_S - time.monotonic()
            if left_s > 0:
                self._watch(begun, left_s)
                return
            # The reader of the output may be gone.
            with contextlib.suppress(OSError, ValueError):
                self._emit(self._take_from(begun))

    def _take_from(self, begun: _Begun) -> str:
        self._open.pop(begun, None)
        text, begun.text = begun.text, ""
        return text

    def _emit(self, text: str) -> None:
        lines = (self._line(line) for line in text.removesuffix("\n").split("\n"))
        super()._emit("".join(f"{line}\n" for line in lines if line is not None))

    def _line(self, line: str) -> str | None:
        """Returns the line as it is printed; None if it is not."""
        line = _ANSI.sub("", line)
        found = _FORWARDED.match(line)
        prefix, rest = (line[: found.end()], line[found.end() :]) if found else ("", line)
        shown = rest.rstrip("\r").rpartition("\r")[2]
        if not shown.strip() or _UNWANTED.match(rest):
            return None
        # What an overwritten line ends with is never one of process/logs.py, whatever it looks like.
        if self._form == "json":
            return rest if _is_object(rest) else json.dumps(self._object(shown, found))
        if _HAS_TIME.match(rest) or (found and found[2] and rest.startswith(_INDENT)):
            return rest if rest.isprintable() else one_line(rest)
        return f"{time_of(time.time())} {one_line(prefix + shown)}"

    def _object(self, message: str, found: re.Match[str] | None) -> dict[str, Any]:
        name, pid, service, host = found.groups() if found else (LAUNCHER, None, None, None)
        level = "info" if found else "error" if message.startswith(_ERROR) else self._level
        line = _object_of(level, "output" if found else __name__, message, name or service or "ray")
        return line | ({"pid": int(pid)} if pid else {}) | ({"host": host} if host else {})


def own_line(form: str, level: str, logger: str, line: str) -> str:
    """Returns a line of the launcher as stdout gets it. In JSON it has the level and logger that it has in the log."""
    return json.dumps(_object_of(level, logger, line, LAUNCHER)) if form == "json" else line


def _object_of(level: str, logger: str, message: str, process: str) -> dict[str, Any]:
    return {
        "time": time_of(time.time()),
        "level": level,
        "logger": logger,
        "message": shortened(message, MAX_CHARS),
        "request_id": None,
        "process": process,
    }


def _is_object(text: str) -> bool:
    if not text.startswith(_OBJECT):
        return False
    try:
        return isinstance(json.loads(text), dict)
    except ValueError:
        return False


def format_output(form: str) -> None:
    """Formats every line of stdout and stderr from here on, until the process exits. Safe to repeat."""
    for name, level in (("stdout", "info"), ("stderr", "warning")):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, FormattedLines):
            lines = FormattedLines(stream, form, level)
            setattr(sys, name, lines)
            atexit.register(lines.finish)


def finish_output() -> None:
    """Writes the lines that have not ended, in a process that exits without Python's own end."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.finish() if isinstance(stream, FormattedLines) else stream.flush()
