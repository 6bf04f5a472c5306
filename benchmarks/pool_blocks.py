"""Measures what the pool does with a request's blocks, from Reserve to Release, in a full pool.

    python -m benchmarks.pool_blocks [--blocks 100000] [--common 125] [--own 8] [--ways 50] [--rounds 3000]

Requests have `--common` blocks in common with those of their group of `--ways`, and `--own` blocks of their own. They
are measured without hashes, as if nothing were shared; with hashes but nothing in common; and as they are. Each event
has the median of its times. Recovery is what a restarted pool does first.
"""

from __future__ import annotations

import hashlib
import random
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

from alignedserve.kvpool.block_allocator import BlockAllocator
from alignedserve.kvpool.owners import OwnerTable
from alignedserve.types import RequestKey
from benchmarks.harness import parser_of, seconds_of

BLOCK_SIZE = 16
# A restarted pool's answer to a router takes longer.
NEVER_S = 1e9
EVENTS = ("reserve", "commit", "make_spare", "release")


def hashes_of(name: str, count: int) -> list[bytes]:
    return [hashlib.sha256(f"{name} {number}".encode()).digest() for number in range(count)]


class Requests:
    def __init__(self, args: Namespace, has_hashes: bool, is_shared: bool) -> None:
        self.table = OwnerTable.plain(args.blocks)
        self._allocator = BlockAllocator(self.table, BLOCK_SIZE, NEVER_S)
        self._args, self._has_hashes, self._is_shared = args, has_hashes, is_shared
        self._key = 0
        self._running: list[tuple[RequestKey, int]] = []
        self.times: dict[str, list[float]] = {name: [] for name in EVENTS}

    def run(self) -> None:
        """Fills the pool. Then requests end in any order, and others of their groups take their places."""
        args, dice = self._args, random.Random(0)
        num_blocks = args.common + args.own
        most = args.blocks // num_blocks
        if self._is_shared:
            most = args.blocks // (args.common + args.ways * args.own) * args.ways
        groups = [hashes_of(f"group {number}", args.common) for number in range(most // args.ways + 1)]
        for number in range(most):
            self._start(number // args.ways, groups)
        for times in self.times.values():
            times.clear()
        for _ in range(args.rounds):
            key, group = self._running.pop(dice.randrange(len(self._running)))
            self._time("make_spare", self._allocator.make_spare, key)
            self._time("release", self._allocator.release, key)
            self._start(group, groups)

    def _start(self, group: int, groups: Sequence[list[bytes]]) -> None:
        self._key += 1
        args, key = self._args, RequestKey(self._key)
        # The last block is never full.
        num_tokens = (args.common + args.own) * BLOCK_SIZE - 1
        hashes: list[bytes] = []
        if self._has_hashes:
            common = groups[group] if self._is_shared else hashes_of(f"all of {key}", args.common)
            hashes = common + hashes_of(f"own of {key}", args.own - 1)
        grant = self._time("reserve", self._allocator.reserve, key, num_tokens, NEVER_S, hashes)
        if grant is None:
            raise RuntimeError(f"request {key} finds no room")
        self._time("commit", self._allocator.commit, key, num_tokens)
        self._running.append((key, group))

    def _time(self, name: str, action: Callable[..., Any], *arguments: Any) -> Any:
        begun_s = time.perf_counter()
        answer = action(*arguments)
        self.times[name].append(time.perf_counter() - begun_s)
        return answer


def main() -> None:
    parser = parser_of(__doc__, rounds=3000)
    for name, least in (("blocks", 100_000), ("common", 125), ("own", 8), ("ways", 50)):
        parser.add_argument(f"--{name}", type=int, default=least)
    args = parser.parse_args()
    print(f"{'microseconds':24}" + "".join(f"{name:>12}" for name in (*EVENTS, "all")) + "   recovery, ms")
    for title, has_hashes, is_shared in (
        ("without hashes", False, False),
        ("nothing in common", True, False),
        (f"{args.ways} begin alike", True, True),
    ):
        requests = Requests(args, has_hashes, is_shared)
        requests.run()
        medians = [1e6 * statistics.median(requests.times[name]) for name in EVENTS]
        recovery_ms = 1e3 * seconds_of(BlockAllocator, requests.table, BLOCK_SIZE, NEVER_S)
        cells = "".join(f"{each:12.1f}" for each in (*medians, sum(medians)))
        print(f"{title:24}{cells}{recovery_ms:15.0f}")


if __name__ == "__main__":
    main()
