"""Islands of real processes that tests borrow: an island is started for the first test that needs one of its kind, and
ends when islands of other kinds take its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cluster.processes import Processes, Setup

# One that tests alternate with, and one more: processes that wait cost little, and memory.
MOST = 2


class Islands:
    def __init__(self, make_directory: Callable[[], Path]) -> None:
        """`make_directory`: makes one for an island's event logs."""
        self._make_directory = make_directory
        # The latest that was borrowed is the last.
        self._running: dict[Setup, Processes] = {}

    def borrow(self, setup: Setup) -> Processes:
        """Running processes of this kind, which the caller leaves running and idle; those behind a gateway the caller
        starts. Raises if others that have to make room do not end as they should."""
        found = self._running.pop(setup, None)
        while found is None and len(self._running) >= MOST:
            self._end(next(iter(self._running)))
        if found is not None:
            self._running[setup] = found
            return found
        started = self._running[setup] = Processes(setup, self._make_directory())
        if not setup.has_gateway:
            started.start_all()
        return started

    def discard(self, processes: Processes) -> None:
        """A test failed with these: the next one of their kind starts others."""
        if self._running.get(processes.setup) is processes:
            del self._running[processes.setup]
        processes.clean_up()

    def end_all(self) -> None:
        for setup in list(self._running):
            self._end(setup)

    def clean_up(self) -> None:
        for processes in self._running.values():
            processes.clean_up()

    def _end(self, setup: Setup) -> None:
        self._running.pop(setup).end()
