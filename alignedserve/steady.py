"""What would make a process stand still later is done before it serves.

- The garbage collector looks through all that there is now and then. What imports and a model leave is most of that,
  and takes it 100 ms; it need not be looked at again.
- The kernel enlarges a process's table of open files when it is full, and waits until all cores have noticed. Where
  they are busy that took more than a second, in whatever thread opens a file or takes a connection.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource

# The table is never larger than this from the beginning: half a megabyte.
MOST_FILES = 1 << 16


def settle() -> None:
    """Once, when all that lasts is there."""
    gc.collect()
    gc.freeze()
    _enlarge_file_table()


def _enlarge_file_table() -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = MOST_FILES if limit == resource.RLIM_INFINITY else min(limit, MOST_FILES)
    with open(os.devnull) as file:
        os.close(fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, most - 1))
