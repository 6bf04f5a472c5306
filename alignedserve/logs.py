"""Log lines, for people (`text`) or machines (`json`, one object a line), each with the id of the call it is about.

What is said beside the message comes as `extra={"fields": {...}}`. Nothing that a client sent, no key and no model's
name is logged at the default level.
"""

from __future__ import annotations

import json
import logging
import sys
import time
from contextvars import ContextVar
from logging.handlers import WatchedFileHandler
from typing import Any, TextIO

FORMATS = ("text", "json")

# of the HTTP call that is being answered
request_id: ContextVar[str | None] = ContextVar("request_id", default=None)


def set_up_logging(form: str, level: str = "INFO", to: TextIO | None = None, path: str | None = None) -> None:
    """Of this process: to `path`, if there is one (whoever rotates it may move it away), else to `to` or stderr. Safe
    to repeat."""
    handler = WatchedFileHandler(path) if path else logging.StreamHandler(to or sys.stderr)
    handler.setFormatter(_JsonFormatter() if form == "json" else _TextFormatter())
    root = logging.getLogger()
    for older in [each for each in root.handlers if isinstance(each.formatter, _Formatter)]:
        root.removeHandler(older)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for package in ("alignedserve", "router", "kvpool", "prefill_worker", "decode_worker"):
        logging.getLogger(package).setLevel(level)


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
            "message": record.getMessage(),
            "request_id": request_id.get(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line | self.fields(record), default=str)


class _TextFormatter(_Formatter):
    def format(self, record: logging.LogRecord) -> str:
        said = "".join(f" {name}={value}" for name, value in self.fields(record).items())
        about = request_id.get() or "-"
        line = f"{self.time(record)} {record.levelname} {record.name} [{about}] {record.getMessage()}{said}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line
