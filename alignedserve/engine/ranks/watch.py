"""Detects that a rank has ended or hangs.

The end of a process is detected at once. A rank that hangs stops counting: each rank increments a counter in the shared
memory twice a second, on a thread of its own, whatever it computes.
"""

from __future__ import annotations

import os
import select
import subprocess
import threading
import time
from collections.abc import Callable, Sequence

import torch

# Seconds between two counts.
BEAT_S = 0.5
# Seconds without a count after which a rank is taken to hang. Longer than any stall of the machine.
SILENCE_S = 15.0
# Seconds to wait after an error for its cause, the end of a rank, to be detected.
_NOTICE_S = 10.0
# Each rank has a line in the shared memory. The counter is at this offset in it (kernels/cpu/ranks.py).
_LINE_BYTES, _OFFSET = 64, 8


def beat_of(shared: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's counter, a view of the shared memory."""
    first = rank * _LINE_BYTES + _OFFSET
    return shared[first : first + 8].view(torch.int64)


class Watch:
    """The leading rank's watch over the others."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], shared: torch.Tensor) -> None:
        self._processes = processes
        self._beats = [beat_of(shared, rank) for rank in range(1, len(processes) + 1)]
        self._pidfds = [os.pidfd_open(process.pid) for process in processes]
        # Which rank is lost; empty if none is. Set before the others are killed.
        self.lost = ""
        self._was_lost = threading.Event()
        self._stop_read, self._stop_write = os.pipe2(os.O_CLOEXEC)
        self._thread: threading.Thread | None = None

    def start(self, break_up: Callable[[], None]) -> None:
        """Starts to watch, on a thread. That thread calls `break_up` when a rank is lost."""
        self._thread = threading.Thread(target=self._run, args=[break_up], name="ranks", daemon=True)
        self._thread.start()

    def what_was_lost(self) -> str:
        self._was_lost.wait(_NOTICE_S)
        return self.lost

    def stop(self) -> None:
        """Called once, when nothing is computed any more."""
        os.close(self._stop_write)
        # The garbage collector may call this on any thread, even on the one that watches.
        if self._thread and self._thread is not threading.current_thread():
            self._thread.join()
        for fd in (self._stop_read, *self._pidfds):
            os.close(fd)

    def _run(self, break_up: Callable[[], None]) -> None:
        poll = select.poll()
        for fd in (self._stop_read, *self._pidfds):
            poll.register(fd, select.POLLIN | select.POLLHUP)
        silences = [Silence() for _ in self._beats]
        while not self.lost:
            found = {fd for fd, _ in poll.poll(BEAT_S * 1000)}
            if self._stop_read in found:
                return
            self.lost = self._look(found, silences)
        # Without one rank the others are useless, and `gloo` only notices when a process ends.
        for process in self._processes:
            process.kill()
        self._was_lost.set()
        break_up()

    def _look(self, found: set[int], silences: Sequence[Silence]) -> str:
        now = time.monotonic()
        for rank, process in enumerate(self._processes, 1):
            if self._pidfds[rank - 1] in found:
                return f"rank {rank} (process {process.pid}) has ended: {process.wait()}"
            if silences[rank - 1].is_over(int(self._beats[rank - 1].item()), now):
                return f"rank {rank} (process {process.pid}) has hung for {SILENCE_S:g} s"
        return ""


class Silence:
    """How long a count has stood still."""

    def __init__(self) -> None:
        self._count = -1
        self._since_s = 0.0

    def is_over(self, count: int, now: float) -> bool:
        if count != self._count:
            self._count, self._since_s = count, now
        return now - self._since_s > SILENCE_S


def beat(shared: torch.Tensor, rank: int, leader: int) -> None:
    """Increments this rank's counter until the leading process has ended. Then it ends this process."""
    count, pidfd = beat_of(shared, rank), os.pidfd_open(leader)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    while not poll.poll(BEAT_S * 1000):
        count.add_(1)
    os._exit(1)
