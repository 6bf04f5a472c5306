"""Runs experiments in several processes, each experiment once per seed, and collects the numbers."""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass

from research.papers.catalogue import PAPERS
from research.papers.claim import Experiment, Numbers, Size


@dataclass(frozen=True)
class Task:
    """One experiment with one seed, as another process receives it."""

    paper: str
    index: int
    seed: int
    size: Size

    @property
    def experiment(self) -> Experiment:
        return PAPERS[self.paper].experiments[self.index]

    @property
    def place(self) -> tuple[str, int]:
        return self.paper, self.index

    def __str__(self) -> str:
        return f"{self.paper}: {self.experiment.claims[0].name}, seed {self.seed}"


@dataclass(frozen=True)
class Done:
    task: Task
    # Maps a claim's name to its numbers.
    numbers: dict[str, Numbers]
    took_s: float
    # CPU seconds, which don't depend on what else the machine does.
    cpu_s: float


@dataclass(frozen=True)
class Measured:
    """One experiment with all its seeds."""

    paper: str
    # Maps a claim's name to the numbers of each seed.
    numbers: dict[str, list[Numbers]]


def work(task: Task) -> Done:
    begun_s, begun_cpu_s = time.monotonic(), time.process_time()
    found = task.experiment.measure(task.size, task.seed)
    return Done(task, dict(found), time.monotonic() - begun_s, time.process_time() - begun_cpu_s)


def tasks(papers: Sequence[str], size: Size, claims: Collection[str] | None = None) -> list[Task]:
    """Tasks that measure elapsed time come last. With `claims`, there are only those that measure one of them. Raises
    ValueError if there is none."""
    found = [
        Task(name, index, seed, size)
        for name in papers
        for index, experiment in enumerate(PAPERS[name].experiments)
        if claims is None or any(claim.name in claims for claim in experiment.claims)
        for seed in range(1 if experiment.is_timed else size.num_seeds)
    ]
    if not found:
        known = (claim.name for name in papers for each in PAPERS[name].experiments for claim in each.claims)
        raise ValueError(f"--claim {', '.join(claims or ())}: must be one of {', '.join(known)}")
    return sorted(found, key=lambda task: task.experiment.is_timed)


def run(todo: Sequence[Task], num_processes: int, told: Callable[[Done], None]) -> Iterator[Measured]:
    """Calls `told` for every finished task. Yields an experiment's results when all its seeds are finished."""
    done: defaultdict[tuple[str, int], list[Done]] = defaultdict(list)
    num_seeds = Counter(task.place for task in todo)
    for each in _each_done(todo, num_processes):
        told(each)
        all_seeds = done[each.task.place]
        all_seeds.append(each)
        if len(all_seeds) == num_seeds[each.task.place]:
            all_seeds.sort(key=lambda one: one.task.seed)
            names = [claim.name for claim in each.task.experiment.claims]
            yield Measured(
                each.task.paper, {name: [one.numbers[name] for one in all_seeds] for name in names}
            )


def _each_done(todo: Sequence[Task], num_processes: int) -> Iterator[Done]:
    with ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn")) as pool:
        pending = [pool.submit(work, task) for task in todo if not task.experiment.is_timed]
        for future in as_completed(pending):
            yield future.result()
    for task in todo:
        if task.experiment.is_timed:
            yield work(task)
