"""Checks and their findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    level: Level
    text: str
    # What the user should do; empty if nothing.
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    area: str
    # Where it raises ValueError, `serve` would fail with the same error.
    run: Callable[[], Iterator[Finding]]
    # Remedy for its ValueErrors.
    remedy: str = ""


class NotChecked(Exception):
    """The check needs something that is missing, which another check reports. The message names it."""


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str, remedy: str = "") -> Finding:
    return Finding("note", text, remedy)


def warn(text: str, remedy: str) -> Finding:
    return Finding("warn", text, remedy)


def fail(text: str, remedy: str) -> Finding:
    return Finding("fail", text, remedy)


def findings_of(check: Check) -> Iterator[Finding]:
    """Yields the findings of a check. An error becomes a finding too, and other checks still run."""
    try:
        yield from check.run()
    except NotChecked as missing:
        yield note(f"not checked: needs {missing}")
    except ValueError as error:
        yield fail(str(error), check.remedy)
    except Exception as error:
        yield fail(
            f"the check failed: {type(error).__name__}: {error}",
            "report this error: it is a bug of the check",
        )


def counted(count: int, noun: str) -> str:
    """Returns a number with its noun, as in "2 cores"."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def in_bytes(count: int) -> str:
    """Returns a number of bytes with its unit."""
    power = min(3, max(0, count.bit_length() - 1) // 10)
    unit = ("bytes", "KiB", "MiB", "GiB")[power]
    return f"{count / 1024**power:.{1 if power else 0}f} {unit}"
