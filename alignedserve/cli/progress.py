"""Progress on stderr, which only a terminal gets."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tqdm import tqdm

# Seconds of work after which a terminal shows that it goes on, and seconds between updates.
QUIET_S, EVERY_S = 1.5, 0.5
_CLEAR_LINE = "\r\x1b[K"


def bar(total: int | None, description: str, unit: str, is_shown: bool = True) -> tqdm[Any]:
    """Returns a bar. It draws nothing unless stderr is a terminal, and it disappears when it is closed."""
    from tqdm import tqdm

    return tqdm(
        total=total,
        desc=description,
        unit=unit,
        disable=not (is_shown and sys.stderr.isatty()),
        leave=False,
        dynamic_ncols=True,
    )


def in_terminal(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options of an engine. Its bars are turned off unless stderr is a terminal."""
    return {**options, "use_tqdm": options["use_tqdm"] and sys.stderr.isatty()}


@contextmanager
def busy(description: str, quiet_s: float = QUIET_S) -> Iterator[None]:
    """Shows the description and the elapsed seconds while the block runs. A short block shows nothing."""
    if not sys.stderr.isatty():
        yield
        return
    begun_s, is_over = time.monotonic(), Event()

    def run() -> None:
        if is_over.wait(quiet_s):
            return
        while True:
            sys.stderr.write(f"{_CLEAR_LINE}{description} … {time.monotonic() - begun_s:.0f} s")
            sys.stderr.flush()
            if is_over.wait(EVERY_S):
                break
        sys.stderr.write(_CLEAR_LINE)
        sys.stderr.flush()

    thread = Thread(target=run, name="busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        # A terminal that does not read must not delay the end.
        thread.join(timeout=1.0)
