"""How many distinct blocks requests have, if those with a common prefix have its blocks in common. Pure.

Requests are counted by runs: blocks, one after the other, that the same requests have. A run is split where a request
ends or continues differently. So a request that enters or leaves takes time for runs, not for blocks.

Sets of requests are counted apart. Set 0 has all requests.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Run:
    # The run before its first block.
    parent: Run | None
    hashes: list[bytes]
    # How many requests of each set have it.
    counts: list[int]


class PrefixCounts:
    def __init__(self, num_sets: int) -> None:
        # By the hash of their first block.
        self._runs: dict[bytes, Run] = {}
        # The number of distinct blocks of each set.
        self.num_blocks = [0] * num_sets

    def add(self, hashes: Sequence[bytes], sets: Iterable[int]) -> Run | None:
        """Counts a request with these block hashes, each of which is that of all tokens up to there. Returns its last
        run; None if it has no blocks."""
        tail, num_found = self._find(hashes)
        if num_found < len(hashes):
            zeros = [0] * len(self.num_blocks)
            tail = self._runs[hashes[num_found]] = Run(tail, [*hashes[num_found:]], zeros)
        run = tail
        while run:
            for each in sets:
                if not run.counts[each]:
                    self.num_blocks[each] += len(run.hashes)
                run.counts[each] += 1
            run = run.parent
        return tail

    def discard(self, tail: Run | None, sets: Iterable[int]) -> None:
        """Counts a request no longer. `tail`: the run that `add` has returned for it."""
        run = tail
        while run:
            for each in sets:
                run.counts[each] -= 1
                if not run.counts[each]:
                    self.num_blocks[each] -= len(run.hashes)
            if not run.counts[0]:
                del self._runs[run.hashes[0]]
            run = run.parent

    def num_found(self, hashes: Sequence[bytes], among: int = 0) -> int:
        """Returns how many of these blocks a request of this set has."""
        return self._match(hashes, among)[1] if self._runs else 0

    def _find(self, hashes: Sequence[bytes]) -> tuple[Run | None, int]:
        """Returns the last run with leading blocks of these, which ends there, and the number of them."""
        tail, num_found, num_in_tail = self._match(hashes, among=0)
        if tail and num_in_tail < len(tail.hashes):
            tail = self._split(tail, num_in_tail)
        return tail, num_found

    def _match(self, hashes: Sequence[bytes], among: int) -> tuple[Run | None, int, int]:
        """Returns the last run with leading blocks of these, the number of them, and how many of them it has."""
        tail, num_found, count = None, 0, 0
        while num_found < len(hashes) and (run := self._runs.get(hashes[num_found])):
            if not run.counts[among]:
                break
            tail, known, begin = run, run.hashes, num_found
            count = min(len(known), len(hashes) - begin)
            # If a hash is equal, those before it are.
            if known[count - 1] != hashes[begin + count - 1]:
                count = bisect_left(range(count), True, key=lambda at: known[at] != hashes[begin + at])
            num_found += count
            if count < len(known):
                break
        return tail, num_found, count

    def _split(self, run: Run, count: int) -> Run:
        """Cuts the run after `count` blocks. Returns the first part. `run` remains the last one of its requests."""
        upper = Run(run.parent, run.hashes[:count], [*run.counts])
        run.parent = upper
        del run.hashes[:count]
        self._runs[upper.hashes[0]], self._runs[run.hashes[0]] = upper, run
        return upper
