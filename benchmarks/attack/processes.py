"""A server's processes: how much memory they use, and whether they are alive."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from alignedserve.launch.leftovers import descendants

LOOK_S = 0.2


def num_bytes(pid: int) -> int:
    """Returns the resident memory of a process and all its descendants. It leaves out shared memory, because the KV
    pool's segment is allocated from the beginning."""
    return sum(map(own_bytes, [pid, *(each for each, _ in descendants(pid))]))


def own_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    kib = {
        name: int(value.split()[0])
        for name, _, value in (line.partition(":") for line in lines)
        if "kB" in value
    }
    return (kib.get("VmRSS", 0) - kib.get("RssShmem", 0)) << 10


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


class MemoryWatch:
    """Watches memory on its own thread while the block runs."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.before = self.most = num_bytes(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            self.most = max(self.most, num_bytes(self._pid))
