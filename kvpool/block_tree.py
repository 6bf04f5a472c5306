"""Which requests list which of the pool's blocks, and which blocks are known by the hash of all tokens up to their end.

    system prompt -+- question         a run: blocks, each the parent of the next one, that the same requests list
                   '- another one -- its next turn

A request lists the blocks of a run and of all runs before it. Counts belong to runs, so an event takes time for runs,
not for blocks. A run is split where a request ends or continues differently.

A block becomes known only if the block before it in the request is known, so known blocks form trees as well. Any
number of requests may list a known block. Known blocks that no request lists are kept until their room is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from alignedserve.types import PoolBlockId

if TYPE_CHECKING:
    from alignedserve.kvpool.owners import Allocation, OwnerTable, Recovered

# The largest number of entries for kept runs at which void ones are not looked for.
_MAX_ENTRIES = 1024


@dataclass(eq=False, slots=True)
class Run:
    # The run before its first block, and the number of blocks before that.
    parent: Run | None
    first: int
    blocks: list[PoolBlockId]
    # The hashes of its first blocks: those that are known.
    hashes: list[bytes] = field(default_factory=list)
    # The numbers of requests that list it, of other requests than spares and of spares.
    num_needed: int = 0
    num_spares: int = 0
    # The number of runs that continue it.
    num_next: int = 0
    # When a request that listed it was last used.
    last_used: int = 0

    @property
    def end(self) -> int:
        return self.first + len(self.blocks)

    @property
    def is_listed(self) -> bool:
        return bool(self.num_needed or self.num_spares)


class _Entry(NamedTuple):
    """A run that was kept."""

    last_used: int
    # Minus the number of blocks before it.
    order: int
    # Tells equal ones apart.
    number: int
    run: Run

    @property
    def is_valid(self) -> bool:
        """Whether it is still kept, and was not listed since."""
        return not self.run.is_listed and bool(self.run.blocks) and self.run.last_used == self.last_used


def path_to(tail: Run | None, num_before: int = 0) -> Iterator[Run]:
    """Yields the run and those before it, as far as they have blocks from number `num_before` on."""
    while tail is not None and tail.end > num_before:
        yield tail
        tail = tail.parent


def blocks_of(tail: Run | None) -> list[PoolBlockId]:
    """Returns the blocks of a request that ends with this run."""
    blocks = list[PoolBlockId]()
    for run in [*path_to(tail)][::-1]:
        blocks += run.blocks
    return blocks


class BlockTree:
    def __init__(self, table: OwnerTable, found: Recovered) -> None:
        """Starts from the table's content. Sets the last run of each request."""
        self._table = table
        # Known runs by the hash of their first block.
        self._known: dict[bytes, Run] = {}
        # The numbers of blocks that requests other than spares list, that several requests list, and that are kept.
        self.num_needed = self.num_shared = self.num_kept = 0
        # Kept runs in the order in which they go: the one last used first, and the deepest of those last used together.
        self._kept: list[_Entry] = []
        self._num_entries = 0
        self._recover(found)

    def _recover(self, found: Recovered) -> None:
        hashes = {block: block_hash for block, block_hash, _ in found.known}
        is_used, ends = np.zeros(self._table.size, bool), [each.blocks[-1] for each in found.allocations]
        is_used[[*hashes]] = True
        for allocation in found.allocations:
            is_used[allocation.blocks] = True
        # Stacks: the last freed block is used next, while it is still cached.
        self.free = [PoolBlockId(block) for block in np.flatnonzero(~is_used)[::-1].tolist()]
        runs = self._runs_of(np.flatnonzero(is_used).tolist(), ends)
        for run in runs.values():
            run.hashes = [hashes[block] for block in run.blocks if block in hashes]
            if run.hashes:
                self._known[run.hashes[0]] = run
            self.num_kept += len(run.blocks)
        for allocation, end in zip(found.allocations, ends, strict=True):
            allocation.tail = runs[end]
            self._list(allocation.tail, allocation.is_spare)
        for run in runs.values():
            if not run.is_listed:
                self._keep(run)

    def _runs_of(self, used: list[int], ends: Iterable[PoolBlockId]) -> dict[PoolBlockId, Run]:
        """Returns the runs of all used blocks by their last blocks, if requests end with `ends`."""
        parents = self._table.parents.tolist()
        num_next = Counter(parents[block] for block in used)
        cuts = {-1, *ends, *(parent for parent, count in num_next.items() if count > 1)}
        next_of = {parents[block]: PoolBlockId(block) for block in used if parents[block] not in cuts}
        runs, starts = dict[PoolBlockId, Run](), list[tuple[int, Run]]()
        for block in used:
            if (parent := parents[block]) in cuts:
                blocks = [PoolBlockId(block)]
                while (following := next_of.get(blocks[-1])) is not None:
                    blocks.append(following)
                runs[blocks[-1]] = run = Run(None, 0, blocks)
                starts.append((parent, run))
        for parent, run in starts:
            if parent >= 0:
                run.parent = runs[PoolBlockId(parent)]
                run.parent.num_next += 1
        for _, run in starts:
            run.first = sum(len(each.blocks) for each in path_to(run.parent))
        return runs

    # ---- finding -----------------------------------------------------------------------------------------------------

    def find(self, hashes: Sequence[bytes]) -> tuple[Run | None, int]:
        """Returns the last run with blocks that are known by the leading hashes, and the number of these blocks."""
        num_found, tail = 0, None
        while num_found < len(hashes) and (run := self._known.get(hashes[num_found])):
            tail, most = run, min(len(run.hashes), len(hashes) - num_found)
            # A hash is that of all tokens up to there. If it is equal, those before it are.
            if run.hashes[most - 1] == hashes[num_found + most - 1]:
                num_found += most
                continue
            begin, known = num_found, run.hashes
            num_found += bisect_left(range(most), True, key=lambda at: known[at] != hashes[begin + at])
            break
        return tail, num_found

    def num_spare_of(self, tail: Run | None, num_blocks: int) -> int:
        """Returns how many of the first `num_blocks` blocks up to this run are not needed."""
        return sum(min(run.end, num_blocks) - run.first for run in path_to(tail) if not run.num_needed)

    # ---- owners ------------------------------------------------------------------------------------------------------

    def take(self, tail: Run | None, num_blocks: int) -> Run | None:
        """Lets a request list the first `num_blocks` blocks up to this run. Returns its last run."""
        if tail and num_blocks < tail.end:
            tail = self._split(tail, num_blocks)
        self._list(tail, is_spare=False)
        return tail

    def extend(self, tail: Run | None, num_blocks: int) -> tuple[Run, list[PoolBlockId]]:
        """Gives free blocks to a request that is no spare. Returns its last run, and these blocks."""
        added = self.free[-num_blocks:][::-1]
        del self.free[-num_blocks:]
        self.num_needed += num_blocks
        if tail and tail.num_needed + tail.num_spares == 1 and not tail.num_next:
            tail.blocks += added
            return tail, added
        if tail:
            tail.num_next += 1
        return Run(tail, tail.end if tail else 0, [*added], num_needed=1), added

    def change(self, tail: Run | None, is_spare: bool) -> None:
        """Counts a request as a spare from now on, or as one no longer."""
        step = -1 if is_spare else 1
        for run in path_to(tail):
            was_needed = run.num_needed > 0
            run.num_needed += step
            run.num_spares -= step
            self.num_needed += ((run.num_needed > 0) - was_needed) * len(run.blocks)

    def leave(self, tail: Run, num_left: int, is_spare: bool, last_used: int) -> Run | None:
        """Lets a request, last used at `last_used`, list only the first `num_left` of its blocks. Returns its last
        run."""
        left = list[Run]()
        for run in path_to(tail, num_left):
            if run.first < num_left:
                self._split(run, num_left)
            left.append(run)
        for run in left:
            self._unlist(run, is_spare)
            run.last_used = max(run.last_used, last_used)
            if not run.is_listed:
                self._free_unknown(run)
                if run.blocks:
                    self._keep(run)
        return left[-1].parent if left else tail

    def _list(self, tail: Run | None, is_spare: bool) -> None:
        for run in path_to(tail):
            size, num_before = len(run.blocks), run.num_needed + run.num_spares
            if is_spare:
                run.num_spares += 1
            else:
                self.num_needed += 0 if run.num_needed else size
                run.num_needed += 1
            if num_before == 1:
                self.num_shared += size
            elif not num_before:
                self.num_kept -= size

    def _unlist(self, run: Run, is_spare: bool) -> None:
        size = len(run.blocks)
        if is_spare:
            run.num_spares -= 1
        else:
            run.num_needed -= 1
            self.num_needed -= 0 if run.num_needed else size
        num_owners = run.num_needed + run.num_spares
        if num_owners == 1:
            self.num_shared -= size
        elif not num_owners:
            self.num_kept += size

    def _split(self, run: Run, num_before: int) -> Run:
        """Cuts the run at the block with this number. Returns the first part. `run` remains the last run of its
        requests."""
        count = num_before - run.first
        upper = Run(
            run.parent,
            run.first,
            run.blocks[:count],
            run.hashes[:count],
            run.num_needed,
            run.num_spares,
            1,
            run.last_used,
        )
        run.parent, run.first = upper, num_before
        del run.blocks[:count], run.hashes[:count]
        for part in (upper, run):
            if part.hashes:
                self._known[part.hashes[0]] = part
        return upper

    # ---- content -----------------------------------------------------------------------------------------------------

    def publish(self, tail: Run, first: int, hashes: Sequence[bytes]) -> bool:
        """Makes a request's blocks known by these hashes, from number `first` on. Returns False and changes nothing if
        the block before them is not known, because nothing can follow it, or if others are known by these hashes."""
        parent, num_known = tail.parent, first - tail.first
        if num_known != len(tail.hashes):
            return False
        if not num_known:
            follows = len(parent.hashes) == len(parent.blocks) if parent else True
            if not follows or hashes[0] in self._known:
                return False
            self._known[hashes[0]] = tail
        blocks = tail.blocks[num_known : num_known + len(hashes)]
        self._table.publish(np.array(blocks, np.int64), hashes)
        tail.hashes += hashes
        return True

    def forget(self, hashes: Sequence[bytes]) -> None:
        """Lets no further request have the blocks known by these hashes, nor those that continue them."""
        if (run := self._known.get(hashes[0]) if hashes else None) is None:
            return
        below = self._table.known_below(run.blocks[:1])
        self._table.forget(below)
        forgotten = {*below}
        for run in [each for each in self._known.values() if each.blocks[0] in forgotten]:
            del self._known[run.hashes[0]]
            run.hashes = []
            if not run.is_listed:
                self._free_unknown(run)

    @property
    def known(self) -> dict[PoolBlockId, bytes]:
        """The hashes of all known blocks. Collected anew each time."""
        return {
            block: each
            for run in self._known.values()
            for block, each in zip(run.blocks, run.hashes, strict=False)
        }

    # ---- room --------------------------------------------------------------------------------------------------------

    @property
    def oldest_kept(self) -> int | None:
        """When the kept blocks that go first were last used. None: none are kept."""
        while self._kept:
            if self._kept[0].is_valid:
                return self._kept[0].last_used
            heappop(self._kept)
        return None

    def drop_kept(self, at_most: int) -> None:
        """Frees kept blocks: the last ones of the run that goes first."""
        run = self._kept[0].run
        num_left = max(len(run.blocks) - at_most, 0)
        self._table.forget(run.blocks[num_left:])
        if not num_left:
            del self._known[run.hashes[0]]
        del run.hashes[num_left:]
        self._free_unknown(run)

    def _free_unknown(self, run: Run) -> None:
        """Frees the blocks that are not known of a run that no request lists."""
        freed = run.blocks[len(run.hashes) :]
        del run.blocks[len(run.hashes) :]
        self.free += freed[::-1]
        self.num_kept -= len(freed)
        if not run.blocks and run.parent:
            run.parent.num_next -= 1

    def _keep(self, run: Run) -> None:
        self._num_entries += 1
        heappush(self._kept, _Entry(run.last_used, -run.first, self._num_entries, run))
        if len(self._kept) > _MAX_ENTRIES + 2 * self.num_kept:
            self._kept = [entry for entry in self._kept if entry.is_valid]
            heapify(self._kept)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check(self, allocations: Collection[Allocation]) -> None:
        """Raises unless every block is listed, kept or free, and the counts are those of these requests."""
        listed = dict.fromkeys(run for each in allocations for run in path_to(each.tail))
        kept = dict.fromkeys(entry.run for entry in self._kept if entry.is_valid)
        num_listed = sum(len(run.blocks) for run in listed)
        if num_listed + self.num_kept + len(self.free) != self._table.size:
            raise RuntimeError(
                f"{num_listed} blocks used + {self.num_kept} kept + {len(self.free)} free "
                f"!= {self._table.size} in all"
            )
        runs = [*listed, *kept]
        distinct = {*self.free, *(block for run in runs for block in run.blocks)}
        if len(distinct) != self._table.size:
            raise RuntimeError(f"{len(distinct)} distinct blocks of {self._table.size}")
        self._check_counts(allocations, runs)
        num_known = sum(len(run.hashes) for run in runs)
        if self._table.num_known != num_known or {*self._known.values()} != {
            run for run in runs if run.hashes
        }:
            raise RuntimeError(
                f"the owner table has {self._table.num_known} known blocks, and there are {num_known} "
                f"in {len(self._known)} runs"
            )

    def _check_counts(self, allocations: Iterable[Allocation], runs: Iterable[Run]) -> None:
        needed, spares, following = Counter[Run](), Counter[Run](), Counter(run.parent for run in runs)
        for each in allocations:
            (spares if each.is_spare else needed).update(path_to(each.tail))
            if blocks_of(each.tail) != each.blocks:
                raise RuntimeError(
                    f"request {each.key} lists {len(each.blocks)} blocks, and others are counted"
                )
        for run in runs:
            if (run.num_needed, run.num_spares) != (needed[run], spares[run]):
                raise RuntimeError(
                    f"block {run.blocks[0]} counts {run.num_needed} requests and {run.num_spares} spares, "
                    f"and {needed[run]} requests and {spares[run]} spares list it"
                )
            if (run.num_next, run.first) != (following[run], run.parent.end if run.parent else 0):
                raise RuntimeError(
                    f"block {run.blocks[0]} follows {run.first} blocks, and {run.num_next} runs follow it; "
                    f"{run.parent.end if run.parent else 0} and {following[run]} should"
                )
        sums = (
            sum(len(run.blocks) for run in runs if needed[run]),
            sum(len(run.blocks) for run in runs if needed[run] + spares[run] > 1),
            sum(len(run.blocks) for run in runs if not run.is_listed),
        )
        if sums != (self.num_needed, self.num_shared, self.num_kept):
            raise RuntimeError(
                f"{self.num_needed} blocks are counted as needed, {self.num_shared} as shared, {self.num_kept} as "
                f"kept; {sums} are"
            )
