"""Runs new seeds on all cores until the time is up or one fails."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import count

from alignedserve.vopr.history import History
from alignedserve.vopr.outcome import Outcome
from alignedserve.vopr.run import run

# Seeds that one process runs before it reports.
_CHUNK = 4


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
    seeds = count(first_seed, _CHUNK)
    with ProcessPoolExecutor(num_jobs) as pool:
        running: set[Future[list[Tried]]] = set()
        has_failed = False
        while running or (not has_failed and time.monotonic() < end_s):
            while len(running) < 2 * num_jobs and not has_failed and time.monotonic() < end_s:
                running.add(pool.submit(_run_chunk, next(seeds), make))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for tried in (each for future in done for each in future.result()):
                told(tried)
                has_failed = has_failed or tried.outcome.failure is not None


def _run_chunk(first: int, make: Make) -> list[Tried]:
    return list(_runs(first, make))


def _runs(first: int, make: Make) -> Iterator[Tried]:
    for seed in range(first, first + _CHUNK):
        tried = Tried(seed, run(make(seed)))
        yield tried
        if tried.outcome.failure:
            return
