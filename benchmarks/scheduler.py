"""Measures scheduling decisions: maintenance of the pool's quad-tree, searches in it, and the router's work.

    python -m benchmarks.scheduler [--rounds 200]

Lengths are log-normal (median 1000, as in published chat traces), uniform over 1 .. 65536, or all near 2000. Searches
are timed from the root, and for an urgent request of any length, for which batches must be expanded. The aims apply to
the median. A search does not include removing the found requests. The router's work is to process the report of an
iteration in which every running request got a token, with as many requests waiting in the pool.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable

from alignedserve.kv.span import KvSpan
from alignedserve.kvpool.batch_builder import BatchLimits
from alignedserve.kvpool.quadtree import MAX_LENGTH, QuadTree
from alignedserve.kvpool.search import find_near, form_batch
from alignedserve.protocol.messages import (
    AnyMessage,
    Candidates,
    DecodeReport,
    Hello,
    InstanceLimits,
    NewTokens,
    PrefillReport,
    Request,
    Reserve,
    Reserved,
    Submit,
)
from alignedserve.router.config import RouterConfig
from alignedserve.router.events import Connected, Received, Send
from alignedserve.router.router import Router
from alignedserve.sampling_params import SamplingParams
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import POLICIES
from alignedserve.types import Epoch, InstanceId, PoolBlockId, RequestKey
from benchmarks.harness import parser_of, seconds_of

BLOCK_SIZE = 16
SIZES = (4096, 100_000)
# 40 % of 50,000 and of 10,000 blocks.
LIMITS = (BatchLimits(20_000, 256, 36), BatchLimits(4_000, 256, 36))
PAIR_AIM_S = 15e-6
SEARCH_AIM_S = {4096: 0.3e-3, 100_000: 1e-3}
NUM_RUNNING = 256
REPORT_AIM_S = 0.5e-3
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


def fill(size: int, draw: Callable[[random.Random], int], dice: random.Random) -> QuadTree:
    tree = QuadTree(KvSpan(BLOCK_SIZE))
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


def measure_urgent(tree: QuadTree, limits: BatchLimits, rounds: int, dice: random.Random) -> Iterable[float]:
    key = RequestKey(10**9)
    longest = min(MAX_LENGTH, limits.max_blocks * BLOCK_SIZE)
    for _ in range(rounds):
        tree.insert(key, dice.randint(1, longest), due_s=1, now=0)
        yield seconds_of(form_batch, tree, limits, 2.0)
        tree.remove(key)


def measure_taking(
    tree: QuadTree,
    limits: BatchLimits,
    rounds: int,
    draw: Callable[[random.Random], int],
    dice: random.Random,
) -> Iterable[float]:
    """Yields the time from the search to the removal of the batch from the tree. New requests replace it."""
    for round_number in range(rounds):
        start = time.perf_counter()
        keys = form_batch(tree, limits)
        tree.take_batch(keys, now=1)
        yield time.perf_counter() - start
        for key in keys:
            tree.insert(RequestKey(key + 10**6 * (round_number + 1)), draw(dice), 10 + dice.random(), now=0)


def measure_near(tree: QuadTree, limits: BatchLimits, rounds: int, dice: random.Random) -> Iterable[float]:
    for _ in range(rounds):
        low = dice.choice(tree.lengths)
        yield seconds_of(find_near, tree, low, low + 500, limits)


class RunningRouter:
    """A router with `num_running` requests on one decode instance and as many in the pool, brought there by events."""

    def __init__(self, policy: str, num_running: int, dice: random.Random) -> None:
        self._router = Router(RouterConfig(link="host"), Epoch(1), SchedulingConfig(policy))
        self._keys = [RequestKey(number) for number in range(1, num_running + 1)]
        limits = InstanceLimits(100_000, BLOCK_SIZE, num_running, 2048, 16_384)
        for role in ("kvpool", "prefill", "decode", "gateway"):
            hello = Hello(role, InstanceId(role), Epoch(1), 1, {}, limits)
            self._router.on(Connected(hello), 0.0)
        for number in range(1, 2 * num_running + 1):
            self._pool(RequestKey(number), LENGTHS["log-normal"](dice) % 16_000 + 1)
        if policy == "aligned":
            self._say("kvpool", Candidates(InstanceId("decode"), self._keys, is_batch=True))
        self._say("decode", self._report([], admitted=self._keys))
        self.num_tokens = 1

    def report(self) -> DecodeReport:
        """Returns the report of an iteration that gave every request one more token."""
        news = [NewTokens(key, self.num_tokens, [1]) for key in self._keys]
        self.num_tokens += 1
        return self._report(news, admitted=[])

    def take(self, report: DecodeReport) -> None:
        self._say("decode", report)

    @property
    def num_running(self) -> int:
        return sum(len(view.running) for view in self._router.state.cluster.decodes)

    def _pool(self, key: RequestKey, length: int) -> None:
        params, blocks = SamplingParams(max_tokens=16_384), [PoolBlockId(0)] * -(-length // BLOCK_SIZE)
        sent = self._say("gateway", Submit(Request(key, [0] * length, params, seed=0, arrival_s=0.0)))
        (asked,) = [each.message for each in sent if isinstance(each.message, Reserve)]
        self._say("kvpool", Reserved(key, blocks, number=asked.number))
        self._say("prefill", PrefillReport([NewTokens(key, 0, [1])], [(key, length)], [], [], 100_000))

    def _say(self, sender: str, message: AnyMessage) -> list[Send]:
        return self._router.on(Received(InstanceId(sender), message), 1.0)

    def _report(self, news: list[NewTokens], admitted: list[RequestKey]) -> DecodeReport:
        return DecodeReport(
            news=news,
            admitted=admitted,
            wants_evicted=[],
            evicted=[],
            num_free_blocks=0,
            num_running=len(self._keys),
            max_length=4000,
            sum_lengths=1000 * len(self._keys),
            min_length=100,
        )


def measure_reports(policy: str, rounds: int, dice: random.Random) -> Iterable[float]:
    router = RunningRouter(policy, NUM_RUNNING, dice)
    if router.num_running != NUM_RUNNING:
        raise RuntimeError(f"{router.num_running} requests run, {NUM_RUNNING} should")
    for _ in range(rounds):
        report = router.report()
        yield seconds_of(router.take, report)


def main() -> None:
    rounds = parser_of(__doc__, rounds=200).parse_args().rounds
    dice = random.Random(1)
    for policy in POLICIES:
        row(
            f"router: a report of {NUM_RUNNING} tokens, {policy}",
            list(measure_reports(policy, rounds, dice)),
            REPORT_AIM_S,
        )
    for size in SIZES:
        for name, draw in LENGTHS.items():
            tree = fill(size, draw, dice)
            print(f"-- {size} requests pooled, {name} lengths, {len(tree.lengths)} of them distinct")
            row("insert and remove", list(measure_pairs(tree, draw, dice)), PAIR_AIM_S)
            for limits in LIMITS:
                aim_s = SEARCH_AIM_S[size]
                given = f"at most {limits.max_blocks} blocks"
                found = len(form_batch(tree, limits))
                times = [seconds_of(form_batch, tree, limits) for _ in range(rounds)]
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
