"""What a check finds, and how checks are run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "warn", "fail"]


@dataclass(frozen=True)
class Finding:
    level: Level
    text: str
    # What the user should do; empty if nothing has to be done.
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    area: str
    # `serve` would end with the ValueErrors that this raises.
    run: Callable[[], Iterator[Finding]]
    # The remedy for its ValueErrors.
    remedy: str = ""


class NotChecked(Exception):
    """The check needs something that another check has found missing; the message names it."""


def ok(text: str) -> Finding:
    return Finding("ok", text)


def note(text: str, remedy: str = "") -> Finding:
    return Finding("note", text, remedy)


def warn(text: str, remedy: str) -> Finding:
    return Finding("warn", text, remedy)


def fail(text: str, remedy: str) -> Finding:
    return Finding("fail", text, remedy)


def findings_of(check: Check) -> Iterator[Finding]:
    """Runs the check. No error in it prevents the next check."""
    try:
        yield from check.run()
    except NotChecked as missing:
        yield note(f"not checked: it takes {missing}")
    except ValueError as error:
        yield fail(str(error), check.remedy)
    except Exception as error:
        yield fail(
            f"the check failed: {type(error).__name__}: {error}", "see what it says; this is not expected"
        )


def in_bytes(count: int) -> str:
    power = min(3, max(0, count.bit_length() - 1) // 10)
    unit = ("bytes", "KiB", "MiB", "GiB")[power]
    return f"{count / 1024**power:.{1 if power else 0}f} {unit}"
