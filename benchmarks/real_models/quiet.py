"""Measures while others use little of the machine, and tells how much they used."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from benchmarks.real_models.servers import processes_of

# The most of the machine that others may use, the seconds of a look at it, and how often something is measured if they
# use more.
BUSY, LOOK_S, NUM_TRIES = 0.1, 1.0, 3

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class Ticks:
    """Processor time since the machine started, of all cores."""

    total: int
    busy: int
    # Used by a process, its descendants, and those that have ended.
    own: int = 0

    @staticmethod
    def now(pid: int | None = None) -> Ticks:
        every = [int(each) for each in Path("/proc/stat").read_text().partition("\n")[0].split()[1:9]]
        own = 0
        for path in processes_of(pid) if pid else ():
            with suppress(OSError):
                own += sum(map(int, (path / "stat").read_text().rpartition(")")[2].split()[11:15]))
        # Without the time in which it was idle, or waited for a disk.
        return Ticks(sum(every), sum(every) - every[3] - every[4], own)

    def others_since(self, before: Ticks) -> float:
        """Returns the share of the processors that others used, other machines of the same host included."""
        own = self.own - before.own
        return (self.busy - before.busy - own) / (self.total - before.total)


@dataclass
class Quiet:
    # Seconds to wait for it before each try.
    patience_s: float
    # The most that others used of the machine during any measurement that was kept.
    others: float = 0.0

    async def measured(self, measure: Callable[[], Awaitable[_Result]]) -> _Result:
        """Measures once, and again if others used much of the machine. Returns the result of the quietest time."""
        tries: list[tuple[float, _Result]] = []
        while len(tries) < NUM_TRIES and (not tries or tries[-1][0] > BUSY):
            self.wait()
            before = Ticks.now(os.getpid())
            result = await measure()
            tries.append((Ticks.now(os.getpid()).others_since(before), result))
        others, result = min(tries, key=lambda each: each[0])
        self.others = max(self.others, others)
        return result

    def wait(self) -> None:
        """Waits until others use little of the machine."""
        deadline = time.monotonic() + self.patience_s
        while True:
            before = Ticks.now(os.getpid())
            time.sleep(LOOK_S)
            if Ticks.now(os.getpid()).others_since(before) <= BUSY or time.monotonic() > deadline:
                return
