"""What scheduling decisions cost: upkeep of the pool's quad-tree, and searches in it.

    python benchmarks/scheduler.py [--rounds 200]

Lengths are drawn log-normally (median 1000, as in published chat traces), evenly over 1 .. 65536, or all near 2000.
Each search is timed from the root and for an urgent request of any length, where batches have to be widened. Aims are
for the median. Not part of a search: removing what it found.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Iterable

from alignedserve.types import RequestKey
from kvpool.basket import Limits
from kvpool.quadtree import MAX_LENGTH, QuadTree
from kvpool.search import find_near, form_batch

BLOCK_SIZE = 16
SIZES = (4096, 100_000)
# 40 % of 50,000 blocks, and of 10,000
LIMITS = (Limits(20_000, 256, 36), Limits(4_000, 256, 36))
PAIR_AIM_S = 15e-6
SEARCH_AIM_S = {4096: 0.3e-3, 100_000: 1e-3}
LENGTHS: dict[str, Callable[[random.Random], int]] = {
    "log-normal": lambda dice: min(max(int(dice.lognormvariate(6.9, 1.1)), 1), MAX_LENGTH),
    "even": lambda dice: dice.randint(1, MAX_LENGTH),
    "narrow": lambda dice: dice.randint(1990, 2010),
}


def row(what: str, times: Iterable[float], aim_s: float | None = None) -> None:
    cuts = statistics.quantiles(times, n=100)
    p50, p99 = cuts[49] * 1e6, cuts[98] * 1e6
    print(f"{what:58} {p50:9.1f} us  {p99:9.1f} us (p99)", end="")
    print(f"   aim {aim_s * 1e6:7.1f} us  {'ok' if p50 <= aim_s * 1e6 else 'MISSED'}" if aim_s else "")


def timed(action: Callable[..., object], *arguments: object) -> float:
    start = time.perf_counter()
    action(*arguments)
    return time.perf_counter() - start


def fill(size: int, draw: Callable[[random.Random], int], dice: random.Random) -> QuadTree:
    tree = QuadTree(BLOCK_SIZE)
    for key in range(1, size + 1):
        tree.insert(RequestKey(key), draw(dice), due_s=10 + dice.random(), now=0)
    return tree


def measure_pairs(
    tree: QuadTree, draw: Callable[[random.Random], int], dice: random.Random
) -> Iterable[float]:
    key = RequestKey(10**9)
    for _ in range(5000):
        length, due_s = draw(dice), 10 + dice.random()
        start = time.perf_counter()
        tree.insert(key, length, due_s, 0)
        tree.remove(key)
        yield time.perf_counter() - start


def measure_urgent(tree: QuadTree, limits: Limits, rounds: int, dice: random.Random) -> Iterable[float]:
    key = RequestKey(10**9)
    longest = min(MAX_LENGTH, limits.max_blocks * BLOCK_SIZE)
    for _ in range(rounds):
        tree.insert(key, dice.randint(1, longest), due_s=1, now=0)
        yield timed(form_batch, tree, limits, 2.0)
        tree.remove(key)


def measure_taking(
    tree: QuadTree, limits: Limits, rounds: int, draw: Callable[[random.Random], int], dice: random.Random
) -> Iterable[float]:
    """From the question to the batch that has left the tree; as many others come in its place."""
    for round_number in range(rounds):
        start = time.perf_counter()
        keys = form_batch(tree, limits)
        tree.take_batch(keys, now=1)
        yield time.perf_counter() - start
        for key in keys:
            tree.insert(RequestKey(key + 10**6 * (round_number + 1)), draw(dice), 10 + dice.random(), now=0)


def measure_near(tree: QuadTree, limits: Limits, rounds: int, dice: random.Random) -> Iterable[float]:
    for _ in range(rounds):
        low = dice.choice(tree.lengths)
        yield timed(find_near, tree, low, low + 500, limits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    dice = random.Random(1)
    for size in SIZES:
        for name, draw in LENGTHS.items():
            tree = fill(size, draw, dice)
            print(f"-- {size} requests pooled, {name} lengths, {len(tree.lengths)} of them distinct")
            row("insert and remove", list(measure_pairs(tree, draw, dice)), PAIR_AIM_S)
            for limits in LIMITS:
                aim_s = SEARCH_AIM_S[size]
                given = f"at most {limits.max_blocks} blocks"
                found = len(form_batch(tree, limits))
                times = [timed(form_batch, tree, limits) for _ in range(rounds)]
                row(f"search from the root, {given}, finds {found}", times, aim_s)
                row(
                    f"search for an urgent one, {given}",
                    list(measure_urgent(tree, limits, rounds, dice)),
                    aim_s,
                )
                row(f"near search, {given}", list(measure_near(tree, limits, rounds, dice)), aim_s)
                row(f"search and removal, {given}", list(measure_taking(tree, limits, rounds, draw, dice)))


if __name__ == "__main__":
    main()
