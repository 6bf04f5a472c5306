"""Runs new seeds on all cores until the time is up or one fails, aimed at places seldom visited, or at nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from itertools import count
from random import Random

from alignedserve.vopr.history import History
from alignedserve.vopr.outcome import Outcome
from alignedserve.vopr.places import Aims
from alignedserve.vopr.plan import Plan
from alignedserve.vopr.run import run

# Returns what a seed makes that is aimed at these.
Make = Callable[[int, Sequence[str]], History]


@dataclass(frozen=True)
class Tried:
    seed: int
    aims: tuple[str, ...]
    outcome: Outcome


def search(
    first_seed: int,
    minutes: float,
    plan_of: Callable[[int], Plan],
    make: Make,
    num_jobs: int,
    told: Callable[[Tried], None],
) -> None:
    """`plan_of` returns a seed's plan; `make` goes to other processes; `told` is called for each seed that was run. It
    ends soon after one that failed."""
    aims = Aims(Random(first_seed))
    end_s = time.monotonic() + 60 * minutes
    seeds = count(first_seed)
    with ProcessPoolExecutor(num_jobs) as pool:
        running: set[Future[Tried]] = set()
        has_failed = False
        while running or (not has_failed and time.monotonic() < end_s):
            while len(running) < 2 * num_jobs and not has_failed and time.monotonic() < end_s:
                seed = next(seeds)
                running.add(pool.submit(_try, seed, aims.draw(plan_of(seed)), make))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for tried in (future.result() for future in done):
                told(tried)
                aims.visited(tried.outcome.visited)
                has_failed = has_failed or tried.outcome.failure is not None


def _try(seed: int, aims: tuple[str, ...], make: Make) -> Tried:
    return Tried(seed, aims, run(make(seed, aims)))
