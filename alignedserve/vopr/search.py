"""Runs new seeds on all cores until the time is up or one fails."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import count

from alignedserve.vopr.history import History
from alignedserve.vopr.outcome import Outcome
from alignedserve.vopr.run import run

# Returns what a seed makes.
Make = Callable[[int], History]


@dataclass(frozen=True)
class Tried:
    seed: int
    outcome: Outcome


def search(first_seed: int, minutes: float, make: Make, num_jobs: int, told: Callable[[Tried], None]) -> None:
    """`make` goes to other processes; `told` is called for each seed that was run. It ends soon after one that
    failed."""
    end_s = time.monotonic() + 60 * minutes
    seeds = count(first_seed)
    with ProcessPoolExecutor(num_jobs) as pool:
        running: set[Future[Tried]] = set()
        has_failed = False
        while running or (not has_failed and time.monotonic() < end_s):
            while len(running) < 2 * num_jobs and not has_failed and time.monotonic() < end_s:
                running.add(pool.submit(_try, next(seeds), make))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for tried in (future.result() for future in done):
                told(tried)
                has_failed = has_failed or tried.outcome.failure is not None


def _try(seed: int, make: Make) -> Tried:
    return Tried(seed, run(make(seed)))
