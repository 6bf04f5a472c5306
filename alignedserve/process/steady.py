"""What would make a process stand still later is done before it serves.

- The garbage collector looks through all objects now and then. What imports and a model leave is most of them, takes
  it 100 ms, and need not be looked at again. Neither need thousands of requests (10 µs each) while they come: almost
  nothing that they leave needs a collector, so it runs in idle moments.
- The kernel enlarges a process's table of open files when it is full, and waits until all cores have noticed. Where
  they are busy that took more than a second, in whatever thread opens a file or accepts a connection.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import resource
from collections.abc import Callable

# The collections of the young generations before one of all objects (Python's default is 10). Each collects some
# thousands of objects.
NUM_BEFORE_ALL = 100
# In an idle moment so many collections are enough for one of all objects; the seconds between looks for such a moment.
NUM_BEFORE_IDLE, IDLE_LOOK_S = 2, 1.0
# The table is made for at most so many files, which takes half a megabyte.
MOST_FILES = 1 << 16


def settle() -> None:
    """Prepares this process. It is called once, when all objects that last have been made."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], NUM_BEFORE_ALL)
    _enlarge_file_table()


async def collect_when_idle(is_idle: Callable[[], bool]) -> None:
    """Collects garbage in idle moments, until it is cancelled."""
    while True:
        await asyncio.sleep(IDLE_LOOK_S)
        if gc.get_count()[2] >= NUM_BEFORE_IDLE and is_idle():
            gc.collect()


def _enlarge_file_table() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MOST_FILES if limit == resource.RLIM_INFINITY else min(limit, MOST_FILES)
    with open(os.devnull) as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, most - 1))
