"""`alignedserve serve`, which gets a signal at a moment of its start: with the event of Python's audit (an import, a
file, a fork, a connection) that has the number in EVENT, counted in the first process and then on in the launcher."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from itertools import count

from alignedserve.cli import main

EVENT, SIGNAL = "SIGNALLED_SERVE_EVENT", "SIGNALLED_SERVE_SIGNAL"


def signal_at(event: int, number: int) -> None:
    first = os.getpid()
    numbers: Iterator[int] = count()

    def on_event(name: str, args: tuple[object, ...]) -> None:
        # Threads count, too, but helpers of the launcher do not.
        if (os.getpid() == first or os.getppid() == first) and next(numbers) == event:
            os.kill(first, number)

    sys.addaudithook(on_event)


if __name__ == "__main__":
    signal_at(int(os.environ[EVENT]), int(os.environ[SIGNAL]))
    main()
