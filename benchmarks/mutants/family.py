"""A process and all its descendants: their CPU time, whether any of them is busy, and how to kill them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections import defaultdict
from dataclasses import dataclass

_PR_SET_CHILD_SUBREAPER = 36
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Load:
    # CPU seconds since the processes began, including ended children.
    cpu_s: float
    # Whether one of them computes, or waits for a CPU or the disk.
    is_busy: bool


def adopt_orphans() -> None:
    """From now on, orphaned descendants become children of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap() -> None:
    """Waits for all ended descendants that have no other parent, since tests wait until they are gone."""
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def load_of(pid: int) -> Load:
    stats = _stats()
    cpu_s, is_busy = 0.0, False
    for each in _family(pid, stats):
        fields = stats.get(each)
        if fields is not None:
            cpu_s += sum(map(int, fields[11:15])) / _TICKS_PER_S
            is_busy = is_busy or _has_busy_thread(each)
    return Load(cpu_s, is_busy)


def kill_descendants() -> None:
    """Kills all descendants of this process, and returns when they are gone."""
    while True:
        below = _family(os.getpid(), _stats())[1:]
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, 0)


def _family(pid: int, stats: dict[int, list[str]]) -> list[int]:
    children = defaultdict(list)
    for each, fields in stats.items():
        children[int(fields[1])].append(each)
    found = [pid]
    for each in found:
        found += children[each]
    return found


def _stats() -> dict[int, list[str]]:
    """Returns the fields of each process's `stat` from its state on, which proc(5) numbers as the third field."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/stat") as file:
                found[int(name)] = file.read().rpartition(")")[2].split()
    return found


def _has_busy_thread(pid: int) -> bool:
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] in "RD":
                    return True
    return False
