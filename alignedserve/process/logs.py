"""Log lines for people (`text`) or programs (`json`, one object per line), each with the id of its call.

Fields beside the message are passed as `extra={"fields": {...}}`. At the default level, nothing that a client sent is
logged, and no key or model name. At debug level, each process logs the messages that it receives and sends about a
request (protocol/peer.py), with the id of its HTTP call.

A message may still contain foreign text, such as a name or an error. So no message can end its line, imitate the next
one or control a terminal, and its length is limited.

Ray forwards what a process writes to stderr to the launcher, which removes Ray's prefix (launch/console.py).
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
# The most characters of a message (and of each line of an exception), and of an exception.
MAX_CHARS, MAX_EXCEPTION_CHARS = 4_000, 40_000

# The id of the HTTP call being answered.
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


@dataclass(frozen=True)
class LogConfig:
    """Log settings, the same for all processes of a system."""

    format: Annotated[str, "format of log lines", FORMATS, "operation"] = "text"
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
        """Sets up logging for this process under the name `name`. Safe to repeat. Raises OSError if the directory can't
        be written, or if other users can write to it."""
        path = None
        if self.dir is not None:
            private_files.make_directory(self.dir)
            path = os.path.join(self.dir, f"{self.prefix}{name}.log")
        process = f"{self.prefix.removesuffix('-')}/{name}" if self.prefix else name
        set_up_logging(self.format, self.level, sys.stderr if has_console else None, path, process)


def set_up_logging(
    form: str, level: str = "info", to: TextIO | None = None, path: str | None = None, process: str = ""
) -> None:
    """Sets up logging for this process: to a stream, a file, or both. The file may be moved away for rotation. Each
    line has the name of the `process`, if there is one. Safe to repeat."""
    root = logging.getLogger()
    for older in [each for each in root.handlers if isinstance(each.formatter, _Formatter)]:
        root.removeHandler(older)
        older.close()
    handlers: list[logging.Handler] = [logging.StreamHandler(to)] if to else []
    if path:
        handlers.append(_File(path))
    for handler in handlers:
        handler.setFormatter(_JsonFormatter(process) if form == "json" else _TextFormatter(process))
        root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker"):
        logging.getLogger(package).setLevel(level.upper())


class _File(WatchedFileHandler):
    """A log file. Lines that can't be written, on a full disk or in a deleted directory, are lost without any other
    failure. The first loss is reported on stderr, and so is the first one after lines could be written again."""

    _is_failing = False

    def _open(self) -> Any:
        return open(self.baseFilename, self.mode, encoding="utf-8", opener=private_files.open_log)

    def emit(self, record: logging.LogRecord) -> None:
        was_failing, self._is_failing = self._is_failing, False
        if self.stream is not None and self.stream.closed:
            # The last close failed, and the next file is not open.
            self.stream = None
        try:
            super().emit(record)
        except OSError as error:
            # The file was moved away, and the new one can't be opened.
            self._failed(error)
        if self._is_failing and not was_failing:
            self._say_so()

    def close(self) -> None:
        # Buffered lines that can't be written are lost.
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


def time_of(seconds: float) -> str:
    """Returns the form of a time that lines begin with. `seconds` are those since 1970."""
    return f"{time.strftime('%Y-%m-%dT%H:%M:%S', time.gmtime(seconds))}.{int(seconds % 1 * 1000):03d}Z"


class _Formatter(logging.Formatter):
    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    @staticmethod
    def fields(record: logging.LogRecord) -> dict[str, Any]:
        return getattr(record, "fields", {})


class _JsonFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": time_of(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": shortened(record.getMessage(), MAX_CHARS),
            "request_id": request_id.get(),
        } | ({"process": self._process} if self._process else {})
        if record.exc_info:
            line["exception"] = shortened(self.formatException(record.exc_info), MAX_EXCEPTION_CHARS)
        return json.dumps(line | self.fields(record), default=str)


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = "".join(f" {name}={_word(str(value))}" for name, value in self.fields(record).items())
        about = request_id.get() or "-"
        message = one_line(record.getMessage())
        process = f"{self._process} " if self._process else ""
        line = (
            f"{time_of(record.created)} {record.levelname} {process}{record.name} [{about}] {message}{said}"
        )
        if not record.exc_info:
            return line
        exception = shortened(self.formatException(record.exc_info), MAX_EXCEPTION_CHARS)
        # Lines of an exception are indented, which no log line is.
        return "\n".join([line, *(f"    {one_line(each)}" for each in exception.split("\n"))])


def one_line(text: str) -> str:
    """Escapes characters that end lines, move the cursor or reverse the direction of writing. Truncates a long text."""
    text = shortened(text, MAX_CHARS)
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode("ascii") for each in text
    )


def _word(text: str) -> str:
    """Returns a field's value, quoted if it could be read as several fields."""
    text = one_line(text)
    return repr(text) if any(each in text for each in " ='\"") else text
