"""What a process of this host uses, together with its child processes."""

from __future__ import annotations

import os
from dataclasses import dataclass

# Fields of /proc/PID/stat after the name, which may hold spaces: utime, stime; and cutime, cstime, the times of child
# processes that have ended.
_OWN, _ENDED = slice(11, 13), slice(13, 15)
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
    # CPU time in ticks: of the process, and of its child processes that have ended
    own: int
    ended: int


def usage_of(pid: int) -> Usage | None:
    """Returns what the process and its child processes use; None if there is no such process. It reads a file for each
    of their threads, which may take milliseconds."""
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
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), num_pages * os.sysconf("SC_PAGE_SIZE"))


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
    return _Read(sum(map(int, fields[_OWN])), sum(map(int, fields[_ENDED])))


def _ended(found: list[_Read | None]) -> list[int | None]:
    return [each and each.ended for each in found]


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
