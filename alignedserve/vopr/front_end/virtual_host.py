"""What the code asks its host for: the time and random bytes. In virtual time the answers come from a clock and a seed.

The real code asks `time` and `secrets`; for the duration of a run these answer for the simulation, as a simulated
kernel would. What is asked by reference instead (`from time import monotonic`) would escape; tests hold that nothing
that runs here does. All processes share one monotonic clock, as on one host; each has a wall clock of its own, which
may be wrong.
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
# All processes say that this is their id, which is none that may be killed.
PID = 1


def true_time(clock: Clock) -> float:
    """Returns the wall clock's time where it is right."""
    return WALL_START_S + clock.now


@contextlib.contextmanager
def hosted(clock: Clock, seed: int) -> Iterator[None]:
    """While the block runs, `time` and `secrets` answer from `clock` and `seed`, and garbage is collected only where
    the code says so: a collection may end asynchronous generators, at a time that differs from run to run."""
    randoms: dict[str, Random] = {}

    def random() -> Random:
        """Each life of a process has a generator of its own."""
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
