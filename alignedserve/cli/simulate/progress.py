"""Shows the progress of a simulation (`Progress` of compare.py): a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

import click

from alignedserve.cli.progress import bar

if TYPE_CHECKING:
    from tqdm import tqdm

# Seconds between lines.
EVERY_S = 5.0

Say = Callable[[str], None]


class Bar:
    def __init__(self, drawn: tqdm[Any], say: Say) -> None:
        self._bar = drawn
        self._say = say

    def begin(self, name: str, total: int) -> None:
        self._bar.reset(total)
        self._bar.set_description(name)

    def advance(self) -> None:
        self._bar.update()

    def tried(self, name: str, rate: float, attainment: float) -> None:
        self._bar.clear()
        self._say(_tried(name, rate, attainment))


class ProgressLines:
    """Prints a line every few seconds from a thread, also while no request ends."""

    def __init__(self, say: Say, every_s: float = EVERY_S) -> None:
        self._say = say
        self._every_s = every_s
        self._name, self._num_done, self._total = "", 0, 0
        self._is_over = Event()
        self._thread = Thread(target=self._run, name="progress", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_over.set()
        # A reader that does not read must not delay the end.
        self._thread.join(timeout=1.0)

    def begin(self, name: str, total: int) -> None:
        self._name, self._num_done, self._total = name, 0, total

    def advance(self) -> None:
        self._num_done += 1

    def tried(self, name: str, rate: float, attainment: float) -> None:
        self._say(_tried(name, rate, attainment))

    def _run(self) -> None:
        while not self._is_over.wait(self._every_s):
            if self._name:
                self._say(f"{self._name}: {self._num_done} of {self._total} requests have ended")


def _tried(name: str, rate: float, attainment: float) -> str:
    return f"{name}: {rate:.3g} requests/s, {100 * attainment:.1f} % in time"


@contextmanager
def shown() -> Iterator[Bar | ProgressLines]:
    """Yields a bar if stderr is a terminal, otherwise lines."""
    say = partial(click.echo, err=True)
    if sys.stderr.isatty():
        with bar(None, "", "req") as drawn:
            yield Bar(drawn, say)
        return
    lines = ProgressLines(say)
    lines.start()
    try:
        yield lines
    finally:
        lines.stop()
