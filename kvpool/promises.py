"""Runs that are promised to the next turns of chats: until a time, they go last when room is needed. Pure.

A run that is promised has only blocks that can be found, and the runs before it are promised for at least as long. So
the ends of prompts still go first."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from heapq import heappop, heappush

from alignedserve.kvpool.runs import Run


@dataclass(frozen=True)
class PromiseLimits:
    # The most blocks that are promised to one owner, and to all.
    of_one: int = 0
    of_all: int = 0


# When the promise ends; minus the number of blocks before the run; a number that tells equal ones apart.
_Entry = tuple[float, int, int, Run]


class PromisedRuns:
    def __init__(self, limits: PromiseLimits) -> None:
        self.limits = limits
        # In the order in which the promises end. An entry is void if its run was promised for longer later, or cut.
        self._entries: list[_Entry] = []
        self._num_entries = 0
        # The number of promised blocks of each owner.
        self.num_blocks: Counter[str] = Counter()

    @property
    def runs(self) -> set[Run]:
        return {run for until, _, _, run in self._entries if run.blocks and run.promised_until == until}

    def has_room(self, owner: str, num_added: int) -> bool:
        num_of_owner, num_of_all = self.num_blocks[owner], self.num_blocks.total()
        return num_of_owner + num_added <= self.limits.of_one and num_of_all + num_added <= self.limits.of_all

    def add(self, run: Run, owner: str, until: float) -> None:
        """Promises the run, or extends its promise."""
        if not run.promised_until:
            run.promised_to = owner
            self.num_blocks[owner] += len(run.blocks)
        run.promised_until = until
        self.push(run)

    def push(self, run: Run) -> None:
        self._num_entries += 1
        heappush(self._entries, (run.promised_until, -run.first, self._num_entries, run))

    def cut(self, run: Run, count: int) -> None:
        """Counts blocks that the run has lost."""
        self.num_blocks[run.promised_to] -= count
        if not self.num_blocks[run.promised_to]:
            del self.num_blocks[run.promised_to]

    @property
    def next(self) -> Run | None:
        """The run with the promise that ends first. If several end then, the one with most blocks before it."""
        while self._entries:
            until, minus_first, _, run = self._entries[0]
            if (run.promised_until, -run.first) == (until, minus_first):
                return run
            heappop(self._entries)
        return None

    def end(self, run: Run) -> None:
        self.cut(run, len(run.blocks))
        run.promised_until = 0.0
