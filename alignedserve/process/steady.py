"""What would make a process stand still later is done before it serves.

- The garbage collector looks through all that there is now and then. What imports and a model leave is most of that,
  and takes it 100 ms; it need not be looked at again. Neither need thousands of requests (10 µs each) while they come:
  almost nothing that they leave needs a collector, and moments with nothing to do are there for that.
- The kernel enlarges a process's table of open files when it is full, and waits until all cores have noticed. Where
  they are busy that took more than a second, in whatever thread opens a file or takes a connection.
"""

from __future__ import annotations

import asyncio
import fcntl
import gc
import os
import resource
from collections.abc import Callable

# Collections of the young that go before one of all (Python's own: 10). Each is some thousands of objects.
NUM_BEFORE_ALL = 100
# In a moment with nothing to do, so many are enough; and it is looked for such a moment so often.
NUM_BEFORE_IDLE, IDLE_LOOK_S = 2, 1.0
# The table is never larger than this from the beginning: half a megabyte.
MOST_FILES = 1 << 16


def settle() -> None:
    """Once, when all that lasts is there."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], NUM_BEFORE_ALL)
    _enlarge_file_table()


async def collect_when_idle(is_idle: Callable[[], bool]) -> None:
    """Until it is cancelled."""
    while True:
        await asyncio.sleep(IDLE_LOOK_S)
        if gc.get_count()[2] >= NUM_BEFORE_IDLE and is_idle():
            gc.collect()


def _enlarge_file_table() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MOST_FILES if limit == resource.RLIM_INFINITY else min(limit, MOST_FILES)
    with open(os.devnull) as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, most - 1))
