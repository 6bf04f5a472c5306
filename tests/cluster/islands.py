"""Islands of real processes that tests borrow.

An island is started for the first test that needs its kind. It ends when islands of other kinds take its place, or when
the file's last test is over.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests.cluster.processes import Processes, Setup

# Two kinds that tests alternate between. Idle processes take little CPU time, but memory.
MOST = 2


class Islands:
    def __init__(self, make_directory: Callable[[], Path], not_ended: list[str]) -> None:
        """`make_directory`: makes a directory for an island's event logs. `not_ended`: islands in this run that did not
        end as they should. It outlives this object, because the test that happens to notice it is run once more and has
        to fail again."""
        self._make_directory = make_directory
        self._not_ended = not_ended
        # The most recently borrowed comes last.
        self._running: dict[Setup, Processes] = {}

    def borrow(self, setup: Setup) -> Processes:
        """Returns running processes of this kind, which the caller leaves running and idle. The caller starts those
        behind a gateway. Raises an error if a process has died meanwhile, or if others that have to make room do not
        end as they should, now or earlier."""
        self.check_all_ended()
        found = self._running.pop(setup, None)
        if found is not None and (dead := found.dead):
            found.clean_up()
            raise AssertionError(f"processes died while no test had them: {dead}")
        while found is None and len(self._running) >= MOST:
            self._end(next(iter(self._running)))
        if found is not None:
            self._running[setup] = found
            return found
        started = self._running[setup] = Processes(setup, self._make_directory())
        if not setup.has_gateway:
            started.start_all()
        return started

    def give_back(self, processes: Processes) -> None:
        """Ends processes that can't wait for another test. Raises an error if they do not end as they should."""
        if not processes.setup.can_wait and self._running.get(processes.setup) is processes:
            self._end(processes.setup)

    def discard(self, processes: Processes) -> None:
        """Drops these because a test failed with them. The next test of their kind starts new ones."""
        if self._running.get(processes.setup) is processes:
            del self._running[processes.setup]
        processes.clean_up()

    def end_all(self) -> None:
        for setup in list(self._running):
            self._end(setup)

    def check_all_ended(self) -> None:
        assert not self._not_ended, f"did not end as they should: {self._not_ended}"

    def clean_up(self) -> None:
        for processes in self._running.values():
            processes.clean_up()

    def _end(self, setup: Setup) -> None:
        try:
            self._running.pop(setup).end()
        except Exception as error:
            self._not_ended.append(f"{setup}: {error!r}")
            raise
