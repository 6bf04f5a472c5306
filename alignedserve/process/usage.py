"""What a process of this host uses, together with its child processes."""

from __future__ import annotations

import os
from dataclasses import dataclass

# Fields of /proc/PID/stat after the name, which may hold spaces: utime, stime; and cutime, cstime, the times of child
# processes that have ended.
_OWN, _ENDED = slice(11, 13), slice(13, 15)
# when the process was started, which tells it from a later one with the same id
_START = 19
# The most attempts to read all processes of a tree while none of them ends.
_MAX_TRIES = 3


@dataclass(frozen=True)
class Usage:
    # CPU time in seconds, with that of child processes, also of those that have ended
    cpu_s: float = 0.0
    # memory in bytes, with that of child processes. Memory that a child process shares with others is left out, because
    # the process itself shares it too.
    resident_bytes: int = 0


@dataclass(frozen=True)
class _Read:
    # the CPU time of the process, in ticks
    own: int
    # the CPU time of its child processes that have ended, in ticks
    ended: int
    start: int


class UsageMeter:
    """Measures processes. Their CPU time never falls, although a child process may take its own with it: if its parent
    ends first, or does not wait for it."""

    def __init__(self) -> None:
        # by process id: its start, the CPU time found last, and the time that children have taken with them, in ticks
        self._last: dict[int, tuple[int, int, int]] = {}

    def usage_of(self, pid: int) -> Usage | None:
        """Returns what the process and its child processes use; None if there is no such process. It reads a file for
        each of their threads, which may take milliseconds."""
        found = _measure(pid)
        if found is None:
            self._last.pop(pid, None)
            return None
        start, ticks, num_pages = found
        before, last, lost = self._last.get(pid, (start, 0, 0))
        if start != before:
            last, lost = 0, 0
        lost += max(last - ticks, 0)
        self._last[pid] = start, ticks, lost
        return Usage((ticks + lost) / os.sysconf("SC_CLK_TCK"), num_pages * os.sysconf("SC_PAGE_SIZE"))


def _measure(pid: int) -> tuple[int, int, int] | None:
    """Returns when the process was started, and the CPU time in ticks and the pages of it and its child processes."""
    for _ in range(_MAX_TRIES):
        pids = _tree(pid)
        found = [_read(each) for each in pids]
        # The time of a process that ends between two reads would count twice, or not at all.
        if None not in found and found[0] and _ended(found) == _ended([_read(each) for each in pids]):
            break
    if not (first := found[0]):
        return None
    ticks = first.own + first.ended + sum(each.own + each.ended for each in found[1:] if each)
    num_pages = _resident(pid)[0] + sum(resident - shared for resident, shared in map(_resident, pids[1:]))
    return first.start, ticks, num_pages


def _tree(pid: int) -> list[int]:
    """Returns the process and its descendants."""
    found = [pid]
    for each in found:
        for thread in _threads(each):
            found += map(int, _text(f"{each}/task/{thread}/children").split())
    return found


def _threads(pid: int) -> list[str]:
    try:
        return os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []


def _read(pid: int) -> _Read | None:
    text = _text(f"{pid}/stat")
    if not text:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    return _Read(sum(map(int, fields[_OWN])), sum(map(int, fields[_ENDED])), int(fields[_START]))


def _ended(found: list[_Read | None]) -> list[int | None]:
    return [each.ended if each else None for each in found]


def _resident(pid: int) -> tuple[int, int]:
    """Returns the pages of the process in memory, and how many of them are shared memory or parts of files."""
    _, resident, shared, *_ = [*map(int, _text(f"{pid}/statm").split())] or [0, 0, 0]
    return resident, shared


def _text(name: str) -> str:
    """Returns the contents of a file in /proc; empty if the process has ended."""
    try:
        descriptor = os.open(f"/proc/{name}", os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(descriptor, 1 << 16).decode(errors="replace")
    except OSError:
        return ""
    finally:
        os.close(descriptor)
