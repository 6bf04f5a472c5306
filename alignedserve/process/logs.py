"""Log lines, for people (`text`) or machines (`json`, one object a line), each with the id of the call it is about.

Fields beside the message are passed as `extra={"fields": {...}}`. Nothing that a client sent, no key and no model's
name is logged at the default level. At debug level each process logs, for each request, the messages about it that it
receives and sends (protocol/message_log.py), with the id of its HTTP call.

Text from elsewhere may get into a message all the same: a name in it, an error about it. So no message can end its
line, look like the next one, or steer a terminal, and none is long.

Ray adds a prefix to what a process writes to stderr and forwards it to the terminal; to read lines by program, have
each process write a file of its own as well.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from contextvars import ContextVar
from dataclasses import dataclass
from logging.handlers import WatchedFileHandler
from typing import Annotated, Any, TextIO

from alignedserve.process import private_files
from alignedserve.types import shortened

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
# The most characters of a message (and of a line of an exception), and of a whole exception.
MAX_CHARS, MAX_EXCEPTION_CHARS = 4_000, 40_000

# The id of the HTTP call that is being answered.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


@dataclass(frozen=True)
class LogConfig:
    """How to log; it is the same for all processes of a system."""

    format: Annotated[str, "format of log lines", FORMATS] = "text"
    level: Annotated[str, "lowest level to log; debug follows each request through the processes", LEVELS] = (
        "info"
    )
    dir: Annotated[str | None, "directory for a log file of each process [default: stderr only]"] = None
    # The names of the files begin with this prefix, which distinguishes islands.
    prefix: str = ""

    def __post_init__(self) -> None:
        for name, allowed in (("format", FORMATS), ("level", LEVELS)):
            if (value := getattr(self, name)) not in allowed:
                raise ValueError(f"log_{name}={value!r}: must be one of {', '.join(allowed)}")

    def start(self, name: str, has_console: bool = True) -> None:
        """Sets up the logging of this process, which is called `name`. Safe to repeat. Raises OSError for a directory
        that can't be written, or that anyone can write to."""
        path = None
        if self.dir is not None:
            private_files.make_directory(self.dir)
            path = os.path.join(self.dir, f"{self.prefix}{name}.log")
        set_up_logging(self.format, self.level, sys.stderr if has_console else None, path)


def set_up_logging(form: str, level: str = "info", to: TextIO | None = None, path: str | None = None) -> None:
    """Sets up the logging of this process, to a stream, a file, or both; the file may be moved away for rotation. Safe
    to repeat."""
    root = logging.getLogger()
    for older in [each for each in root.handlers if isinstance(each.formatter, _Formatter)]:
        root.removeHandler(older)
        older.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(to)] if to else []
    if path:
        handlers.append(_File(path))
    for handler in handlers:
        handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker"):
        logging.getLogger(package).setLevel(level.upper())


class _File(WatchedFileHandler):
    """Lines that can't be written, on a full disk or in a directory that is gone, are lost: nothing else fails for
    that. It is said once on stderr, and again if it happens again after lines could be written."""

    _is_failing = False

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding="utf-8", opener=private_files.open_log)

    def emit(self, record: logging.LogRecord) -> None:
        was_failing, self._is_failing = self._is_failing, False
        if self.stream is not None and self.stream.closed:
            # It failed as it was closed, and the next one is not open.
            self.stream = None
        try:
            super().emit(record)
        except OSError as error:
            # A file that was moved away, and whose successor can't be opened.
            self._failed(error)
        if self._is_failing and not was_failing:
            self._say_so()

    def close(self) -> None:
        # What could not be written until now is lost.
        with contextlib.suppress(OSError):
            super().close()

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._failed(error)
        else:
            super().handleError(record)

    def _failed(self, error: OSError) -> None:
        self._is_failing, self._why = True, error.strerror or str(error)

    def _say_so(self) -> None:
        # stderr may be closed, or on the same disk.
        with contextlib.suppress(OSError, ValueError, AttributeError):
            sys.stderr.write(f"{self.baseFilename}: no lines can be written now: {self._why}\n")
            sys.stderr.flush()


class _Formatter(logging.Formatter):
    @staticmethod
    def fields(record: logging.LogRecord) -> dict[str, Any]:
        return getattr(record, "fields", {})

    @staticmethod
    def time(record: logging.LogRecord) -> str:
        return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(record.created))}.{int(record.msecs):03d}Z"


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shortened(record.getMessage(), MAX_CHARS),
            "request_id": request_id.get(),
        }
        if record.exc_info:
            line["exception"] = shortened(self.formatException(record.exc_info), MAX_EXCEPTION_CHARS)
        return json.dumps(line | self.fields(record), default=str)


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = "".join(f" {name}={_word(str(value))}" for name, value in self.fields(record).items())
        about = request_id.get() or "-"
        message = one_line(record.getMessage())
        line = f"{self.time(record)} {record.levelname} {record.name} [{about}] {message}{said}"
        if not record.exc_info:
            return line
        exception = shortened(self.formatException(record.exc_info), MAX_EXCEPTION_CHARS)
        # The exception is indented further than any line begins.
        return "\n".join([line, *(f"    {one_line(each)}" for each in exception.split("\n"))])


def one_line(text: str) -> str:
    """Writes characters that end lines, move a cursor or turn the direction of writing as escapes; shortens a long
    text."""
    text = shortened(text, MAX_CHARS)
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def _word(text: str) -> str:
    """Returns a field's value, quoted where it could look like several fields."""
    text = one_line(text)
    return repr(text) if any(each in text for each in " ='\"") else text
