"""The format of what `serve` prints: each line has a time, or is a JSON object.

Three kinds of text arrive on the launcher's stdout and stderr:
- the launcher's own lines, which have no time yet;
- lines of other processes, which Ray forwards. It puts a prefix such as `(DecodeActor pid=7)` before each. Those that
  are written by process/logs.py have the right format already, and lose the prefix;
- everything else: what libraries print, Ray's reports and tracebacks.

Ray would also colour lines, and count similar lines of several processes instead of printing them. Two variables of the
environment turn that off (ray_cluster.py).
"""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any, TextIO

from alignedserve.process.logs import MAX_CHARS, one_line, time_of
from alignedserve.process.whole_lines import WholeLines
from alignedserve.types import shortened

LAUNCHER = "launcher"
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


class FormattedLines(WholeLines):
    """Writes whole lines in one of logs.FORMATS. A line that has not ended is held back, also if it is flushed."""

    def __init__(self, stream: TextIO, form: str, level: str) -> None:
        """`level` is the level of the launcher's own lines in JSON."""
        super().__init__(stream)
        self._form = form
        self._level = level

    def flush(self) -> None:
        """The lines so far are written already."""

    def _emit(self, text: str) -> None:
        lines = (self._line(line) for line in text.removesuffix("\n").split("\n"))
        super()._emit("".join(f"{line}\n" for line in lines if line is not None))

    def _line(self, line: str) -> str | None:
        """Returns the line as it is printed; None if it is not."""
        line = _ANSI.sub("", line)
        found = _FORWARDED.match(line)
        rest = line[found.end() :] if found else line
        if not rest.strip() or _UNWANTED.match(rest):
            return None
        if self._form == "json":
            return rest if _is_object(rest) else json.dumps(self._object(rest, found))
        if _HAS_TIME.match(rest) or (found and found[2] and rest.startswith(_INDENT)):
            return rest if rest.isprintable() else one_line(rest)
        return f"{time_of(time.time())} {one_line(line)}"

    def _object(self, message: str, found: re.Match[str] | None) -> dict[str, Any]:
        name, pid, service, host = found.groups() if found else (LAUNCHER, None, None, None)
        line: dict[str, Any] = {
            "time": time_of(time.time()),
            "level": "info" if found else self._level,
            "logger": "output" if found else __name__,
            "message": shortened(message, MAX_CHARS),
            "request_id": None,
            "process": name or service or "ray",
        }
        return line | ({"pid": int(pid)} if pid else {}) | ({"host": host} if host else {})


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
            setattr(sys, name, FormattedLines(stream, form, level))
