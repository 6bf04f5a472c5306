"""`alignedserve serve`, which gets a signal at a moment of its start: with the event of Python's audit (an import, a
file, a fork, a connection) that has the number in EVENT, counted in the first process and then on in the launcher.

The file COUNTS has the numbers of the latest events, first that of the first process, and then that of the launcher.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import count

from alignedserve.cli import main

EVENT, SIGNAL, COUNTS = "SIGNALLED_SERVE_EVENT", "SIGNALLED_SERVE_SIGNAL", "SIGNALLED_SERVE_COUNTS"
# of a number in the file COUNTS
DIGITS = 12


def signal_at(event: int, number: int, counts: str) -> None:
    first = os.getpid()
    numbers: Iterator[int] = count()
    file = os.open(counts, os.O_WRONLY)

    def on_event(name: str, args: tuple[object, ...]) -> None:
        # Threads count, too, but helpers of the launcher do not.
        if not (os.getpid() == first or os.getppid() == first):
            return
        reached = next(numbers)
        os.pwrite(file, f"{reached:{DIGITS}}".encode(), 0 if os.getpid() == first else DIGITS)
        if reached == event:
            os.kill(first, number)

    sys.addaudithook(on_event)


if __name__ == "__main__":
    signal_at(int(os.environ[EVENT]), int(os.environ[SIGNAL]), os.environ[COUNTS])
    main()
