"""How many distinct blocks requests have, if those with a common prefix have its blocks in common. Pure.

Requests are counted by runs: blocks, one after the other, that the same requests have. A run is split where a request
ends or continues differently. So a request that enters or leaves takes time for runs, not for blocks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Run:
    # The run before its first block.
    parent: Run | None
    hashes: list[bytes]
    # The numbers of requests that have it, and of best-effort requests among them.
    num_requests: int = 0
    num_be: int = 0


class PrefixCounts:
    def __init__(self) -> None:
        # By the hash of their first block.
        self._runs: dict[bytes, Run] = {}
        # Distinct blocks of all requests, and those of best effort.
        self.num_blocks = 0
        self.num_be_blocks = 0

    def add(self, hashes: Sequence[bytes], is_rt: bool) -> Run | None:
        """Counts a request with these block hashes, each of which is that of all tokens up to there. Returns its last
        run; None if it has no blocks."""
        tail, num_found = self._find(hashes)
        if num_found < len(hashes):
            tail = self._runs[hashes[num_found]] = Run(tail, [*hashes[num_found:]])
        run = tail
        while run:
            self.num_blocks += 0 if run.num_requests else len(run.hashes)
            run.num_requests += 1
            if not is_rt:
                self.num_be_blocks += 0 if run.num_be else len(run.hashes)
                run.num_be += 1
            run = run.parent
        return tail

    def discard(self, tail: Run | None, is_rt: bool) -> None:
        """Counts a request no longer. `tail`: the run that `add` has returned for it."""
        run = tail
        while run:
            run.num_requests -= 1
            if not is_rt:
                run.num_be -= 1
                self.num_be_blocks -= 0 if run.num_be else len(run.hashes)
            if not run.num_requests:
                self.num_blocks -= len(run.hashes)
                del self._runs[run.hashes[0]]
            run = run.parent

    def num_found(self, hashes: Sequence[bytes], only_be: bool = False) -> int:
        """Returns how many of these blocks a counted request has; with `only_be`, one of best effort."""
        return self._match(hashes, only_be)[1]

    def _find(self, hashes: Sequence[bytes]) -> tuple[Run | None, int]:
        """Returns the last run with leading blocks of these, which ends there, and the number of them."""
        tail, num_found, num_in_tail = self._match(hashes, only_be=False)
        if tail and num_in_tail < len(tail.hashes):
            tail = self._split(tail, num_in_tail)
        return tail, num_found

    def _match(self, hashes: Sequence[bytes], only_be: bool) -> tuple[Run | None, int, int]:
        """Returns the last run with leading blocks of these, the number of them, and how many of them it has."""
        tail, num_found, count = None, 0, 0
        while num_found < len(hashes) and (run := self._runs.get(hashes[num_found])):
            if only_be and not run.num_be:
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
        upper = Run(run.parent, run.hashes[:count], run.num_requests, run.num_be)
        run.parent = upper
        del run.hashes[:count]
        self._runs[upper.hashes[0]], self._runs[run.hashes[0]] = upper, run
        return upper
