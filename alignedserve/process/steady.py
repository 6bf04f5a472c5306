"""Preparation before serving that prevents pauses later.

- A full garbage collection traverses all objects, most of which come from imports and the model. It takes 100 ms and
  finds nothing among those, so they are exempted. Nor do thousands of requests (10 µs each) need it while they arrive,
  since they leave almost no cycles. So it runs in idle moments.
- When a process's table of open files is full, the kernel enlarges it and waits for all cores. On busy cores that has
  taken more than a second, in any thread that opened a file or accepted a connection.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import resource
from collections.abc import Callable

# Collections of the middle generation before a full one (Python's default is 10). Each covers some thousands of
# objects.
NUM_BEFORE_ALL = 100
# The middle-generation collections after which an idle moment is used for a full one. Seconds between checks for an
# idle moment.
NUM_BEFORE_IDLE, IDLE_LOOK_S = 2, 1.0
# Slots of the enlarged file table, at most. It takes half a megabyte.
MOST_FILES = 1 << 16


def settle() -> None:
    """Prepares this process. Call it once, after all long-lived objects exist."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], NUM_BEFORE_ALL)
    _enlarge_file_table()


async def collect_when_idle(is_idle: Callable[[], bool]) -> None:
    """Collects garbage in idle moments. Runs until it is cancelled."""
    while True:
        await asyncio.sleep(IDLE_LOOK_S)
        if gc.get_count()[2] >= NUM_BEFORE_IDLE and is_idle():
            gc.collect()


def _enlarge_file_table() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MOST_FILES if limit == resource.RLIM_INFINITY else min(limit, MOST_FILES)
    with open(os.devnull) as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, most - 1))
