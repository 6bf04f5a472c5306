"""Runs new seeds on all cores until the time is up or one fails. Seeds are aimed at rarely visited places, or at
nothing."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from random import Random

from alignedserve.vopr.history import History
from alignedserve.vopr.outcome import RunOutcome
from alignedserve.vopr.places import Aims
from alignedserve.vopr.plan import Plan
from alignedserve.vopr.runs.run import run

# Returns the history of a seed with these aims.
Make = Callable[[int, Sequence[str]], History]


@dataclass(frozen=True)
class Tried:
    seed: int
    aims: tuple[str, ...]
    outcome: RunOutcome


# The distance between a seed and the seeds with visits that determine its aims: all up to this many before it. It does
# not depend on how many run at a time, so a first seed yields the same histories anywhere.
LAG = 64


class Drawing:
    """Draws the aims of one seed after the other."""

    def __init__(self, first_seed: int) -> None:
        self._aims = Aims(Random(first_seed))
        self._next_counted = first_seed
        # The visits of seeds that have ended and are not counted yet.
        self._visited: dict[int, Counter[str]] = {}

    def has_ended(self, tried: Tried) -> None:
        self._visited[tried.seed] = tried.outcome.visited

    def can_draw(self, seed: int) -> bool:
        """Returns whether all seeds that determine the aims of this one have ended. Counts their visits."""
        while self._next_counted <= seed - LAG and self._next_counted in self._visited:
            self._aims.visited(self._visited.pop(self._next_counted))
            self._next_counted += 1
        return self._next_counted > seed - LAG

    def draw(self, plan: Plan) -> tuple[str, ...]:
        return self._aims.draw(plan)


def search(
    first_seed: int,
    minutes: float,
    plan_of: Callable[[int], Plan],
    make: Make,
    num_jobs: int,
    told: Callable[[Tried], None],
) -> None:
    """Runs seeds until soon after one has failed. `plan_of` returns a seed's plan. `make` is sent to other processes.
    `told` is called for each seed that was run."""
    drawing, seed = Drawing(first_seed), first_seed
    end_s = time.monotonic() + 60 * minutes
    # The logs of simulated processes only repeat which faults they have met.
    with ProcessPoolExecutor(num_jobs, initializer=logging.disable) as pool:
        running: set[Future[Tried]] = set()
        has_failed = False
        while running or (not has_failed and time.monotonic() < end_s):
            is_over = has_failed or time.monotonic() >= end_s
            while len(running) < 2 * num_jobs and not is_over and drawing.can_draw(seed):
                running.add(pool.submit(_try, seed, drawing.draw(plan_of(seed)), make))
                seed += 1
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for tried in (future.result() for future in done):
                told(tried)
                drawing.has_ended(tried)
                has_failed = has_failed or tried.outcome.failure is not None


def _try(seed: int, aims: tuple[str, ...], make: Make) -> Tried:
    return Tried(seed, aims, run(make(seed, aims)))
