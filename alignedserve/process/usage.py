"""What a process of this host uses."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

# fields of /proc/PID/stat after the name, which may hold spaces: utime, stime, cutime, cstime, rss
_CPU, _RESIDENT = slice(11, 15), 21


@dataclass(frozen=True)
class Usage:
    # CPU time in seconds, with that of child processes that have ended
    cpu_s: float = 0.0
    # memory in bytes, shared memory included
    resident_bytes: int = 0


def usage_of(pid: int) -> Usage | None:
    """Returns what the process uses, without its child processes that run; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text[text.rindex(")") + 2 :].split()
    ticks = sum(map(int, fields[_CPU]))
    return Usage(ticks / os.sysconf("SC_CLK_TCK"), int(fields[_RESIDENT]) * os.sysconf("SC_PAGE_SIZE"))
