"""The host's time and random bytes. In virtual time they come from a clock and a seed.

The real code calls `time` and `secrets`. During a run these answer for the simulation, as a simulated kernel would. A
reference such as `from time import monotonic` would escape that; tests ensure that no code here has one. All processes
share one monotonic clock, as on one host. Each has its own wall clock, which may be wrong.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
import time
from collections.abc import Iterator
from random import Random
from unittest import mock

from alignedserve.sim.clock import Clock
from alignedserve.vopr.front_end.virtual_process import current_process

# The wall clock at the start of a run, in seconds since 1970.
WALL_START_S = 1_900_000_000.0
# The process id of all simulated processes. It must never be killed.
PID = 1


def true_time(clock: Clock) -> float:
    """Returns the right wall clock time."""
    return WALL_START_S + clock.now


@contextlib.contextmanager
def hosted(clock: Clock, seed: int) -> Iterator[None]:
    """Lets `time` and `secrets` answer from `clock` and `seed` while the block runs. Garbage is collected only on
    explicit calls: a collection may end asynchronous generators, at a time that differs between runs."""
    randoms: dict[str, Random] = {}

    def random() -> Random:
        """Returns the generator of the current process's life."""
        process = current_process()
        name = process.name if process else ""
        return randoms.setdefault(name, Random(f"{seed} {name}"))

    def wall() -> float:
        process = current_process()
        return true_time(clock) + (process.wall_ahead_s if process else 0.0)

    was_enabled = gc.isenabled()
    gc.disable()
    try:
        with (
            mock.patch.object(os, "getpid", lambda: PID),
            mock.patch.object(time, "time", wall),
            mock.patch.object(time, "monotonic", lambda: clock.now),
            mock.patch.object(time, "clock_gettime_ns", lambda _: round(clock.now * 1e9)),
            mock.patch.object(secrets, "token_bytes", lambda num_bytes=32: random().randbytes(num_bytes)),
            mock.patch.object(secrets, "randbelow", lambda below: random().randrange(below)),
        ):
            yield
    finally:
        if was_enabled:
            gc.enable()
