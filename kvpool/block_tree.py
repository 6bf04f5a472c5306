"""Which requests list which of the pool's blocks, and which blocks are known by the hash of all tokens up to their end.

Counts belong to runs, so an event takes time for runs, not for blocks. A run is split where a request ends or continues
differently.

Where kept blocks have several owners, those of the owner with most of them go first. Blocks that follow each other have
one owner, because hashes are salted with it. Owners are not in the table: the owner of blocks that an earlier process
has left is unknown until a request lists them, and they go by age alone.

A block becomes known only if the block before it in the request is known, so known blocks form trees as well. Any
number of requests may list a known block. Known blocks that no request lists are kept until their room is needed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush

import numpy as np

from alignedserve.kvpool.owners import Allocation, OwnerTable, Recovered
from alignedserve.kvpool.promises import PromisedRuns, PromiseLimits
from alignedserve.kvpool.runs import Run, path_to, runs_of
from alignedserve.types import PoolBlockId

# The largest number of entries for kept runs at which void ones are not looked for.
_MAX_ENTRIES = 1024


# When a run that was kept was last used; minus the number of blocks before it; a number that tells equal ones apart.
_Entry = tuple[int, int, int, Run]


def _is_valid(entry: _Entry) -> bool:
    """Returns whether the run is still kept, was not listed or cut since, and is not promised."""
    last_used, minus_first, _, run = entry
    if run.promised_until or run.num_needed or run.num_spares:
        return False
    return (run.last_used, -run.first) == (last_used, minus_first) and bool(run.blocks)


class BlockTree:
    def __init__(self, table: OwnerTable, found: Recovered, limits: PromiseLimits | None = None) -> None:
        """Starts from the table's content. Sets the last run of each request."""
        self._table = table
        # Known runs by the hash of their first block.
        self._known: dict[bytes, Run] = {}
        # The numbers of blocks that requests other than spares list, and that several requests list.
        self.num_needed = self.num_shared = 0
        # The numbers of kept blocks by owner.
        self._num_kept_by: Counter[str] = Counter()
        # The kept runs of each owner in the order in which they go: the one last used first, and the deepest of those
        # last used together.
        self._kept: dict[str, list[_Entry]] = {}
        self._num_entries = 0
        # Kept blocks that are promised.
        self.num_promised = 0
        self.promises = PromisedRuns(limits or PromiseLimits())
        self._recover(found)

    def _recover(self, found: Recovered) -> None:
        # Stacks: the last freed block is used next, while it is still cached.
        self.free = [PoolBlockId(block) for block in np.flatnonzero(~found.is_used)[::-1].tolist()]
        ends = [end for _, end in found.allocations]
        runs = runs_of(self._table.parents, np.flatnonzero(found.is_used), ends)
        for run in runs.values():
            run.hashes = [found.known[block] for block in run.blocks if block in found.known]
            if run.hashes:
                self._known[run.hashes[0]] = run
            self._num_kept_by[run.owner] += len(run.blocks)
        for allocation, end in found.allocations:
            allocation.tail = runs[end]
            self._list(allocation.tail, allocation.is_spare)
        for run in runs.values():
            if not run.is_listed:
                self._keep(run)

    @property
    def num_kept(self) -> int:
        return self._num_kept_by.total()

    @property
    def knows_content(self) -> bool:
        """Whether any block is known."""
        return bool(self._known)

    # ---- finding -----------------------------------------------------------------------------------------------------

    def find(self, hashes: Sequence[bytes], at_most: int) -> tuple[Run | None, int]:
        """Returns the last run with blocks that are known by the first `at_most` hashes, and the number of blocks."""
        num_found, tail, at_most = 0, None, min(at_most, len(hashes))
        while num_found < at_most and (run := self._known.get(hashes[num_found])):
            tail, most = run, min(len(run.hashes), at_most - num_found)
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
        num_spare = 0
        # Whatever needs a block needs those before it.
        while tail and not tail.num_needed:
            num_spare += num_blocks - tail.first
            num_blocks, tail = tail.first, tail.parent
        return num_spare

    def num_kept_of(self, tail: Run | None, num_blocks: int) -> int:
        """Returns how many of the first `num_blocks` blocks up to this run are kept and not promised."""
        num_kept = 0
        while tail and not tail.is_listed:
            num_kept += 0 if tail.promised_until else num_blocks - tail.first
            num_blocks, tail = tail.first, tail.parent
        return num_kept

    # ---- owners ------------------------------------------------------------------------------------------------------

    def take(self, tail: Run | None, num_blocks: int) -> Run | None:
        """Lets a request list the first `num_blocks` blocks up to this run. Returns its last run."""
        if tail and num_blocks < tail.end:
            tail = self._split(tail, num_blocks)
        self._list(tail, is_spare=False)
        return tail

    def own(self, tail: Run | None, owner: str) -> None:
        """Gives the blocks up to this run, as far as their owner is unknown, to the owner of a request that lists
        them."""
        while tail and not tail.owner:
            tail.owner, tail = owner, tail.parent

    def extend(self, tail: Run | None, added: Sequence[PoolBlockId], owner: str) -> Run:
        """Gives blocks that nothing uses to a request of `owner` that is no spare. Returns its last run."""
        self.num_needed += len(added)
        is_own = tail and tail.num_needed + tail.num_spares == 1 and not tail.num_next
        if tail and is_own and not tail.promised_until:
            tail.blocks += added
            return tail
        if tail:
            tail.num_next += 1
        return Run(tail, tail.end if tail else 0, [*added], num_needed=1, owner=tail.owner if tail else owner)

    def change(self, tail: Run | None, is_spare: bool) -> None:
        """Counts a request as a spare from now on, or as one no longer."""
        step = -1 if is_spare else 1
        while tail:
            was_needed = tail.num_needed > 0
            tail.num_needed += step
            tail.num_spares -= step
            if (tail.num_needed > 0) != was_needed:
                self.num_needed += step * len(tail.blocks)
            tail = tail.parent

    def leave(self, tail: Run | None, num_left: int, is_spare: bool, last_used: int) -> Run | None:
        """Lets a request, last used at `last_used`, list only the first `num_left` of its blocks. Returns its last
        run."""
        run = tail
        while run and run.end > num_left:
            if run.first < num_left:
                self._split(run, num_left)
            self._unlist(run, is_spare)
            run.last_used = max(run.last_used, last_used)
            if not run.is_listed:
                self.free += self._cut(run)
                if run.blocks:
                    self._keep(run)
            run = run.parent
        return run

    def _list(self, tail: Run | None, is_spare: bool) -> None:
        while tail:
            size, num_before = len(tail.blocks), tail.num_needed + tail.num_spares
            if is_spare:
                tail.num_spares += 1
            else:
                self.num_needed += 0 if tail.num_needed else size
                tail.num_needed += 1
            if num_before == 1:
                self.num_shared += size
            elif not num_before:
                self._num_kept_by[tail.owner] -= size
                self.num_promised -= size if tail.promised_until else 0
            tail = tail.parent

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
            self._num_kept_by[run.owner] += size
            self.num_promised += size if run.promised_until else 0

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
            run.promised_until,
            run.promised_to,
            run.owner,
        )
        run.parent, run.first = upper, num_before
        del run.blocks[:count], run.hashes[:count]
        # Entries of the order in which runs go have the number of blocks before them.
        if run.promised_until:
            self.promises.push(upper)
            self.promises.push(run)
        elif not run.is_listed:
            self._keep(run)
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

    def forget_all(self) -> None:
        """Makes all blocks unknown, and frees those that no request lists."""
        self._table.forget([*self.known])
        runs, self._known = [*self._known.values()], {}
        for run in runs:
            run.hashes.clear()
            if not run.is_listed:
                self.free += self._cut(run)

    @property
    def known(self) -> dict[PoolBlockId, bytes]:
        """The hashes of all known blocks. Collected anew each time."""
        return {
            block: each
            for run in self._known.values()
            for block, each in zip(run.blocks, run.hashes, strict=False)
        }

    # ---- room --------------------------------------------------------------------------------------------------------

    def _next_kept(self, until: int) -> Run | None:
        """Returns the kept blocks that go first, from their end on. None: none, of any owner, were last used at `until`
        or before. Promised ones don't go."""
        oldest = {owner: run for owner in [*self._kept] if (run := self._oldest_of(owner))}
        if all(run.last_used > until for run in oldest.values()):
            return None
        unknown = oldest.pop("", None)
        most = max(oldest.values(), key=lambda run: self._num_kept_by[run.owner], default=None)
        return min((each for each in (unknown, most) if each), key=lambda run: run.last_used)

    def _oldest_of(self, owner: str) -> Run | None:
        entries = self._kept[owner]
        while entries:
            if _is_valid(entries[0]):
                return entries[0][-1]
            heappop(entries)
        del self._kept[owner]
        return None

    def drop_kept(self, at_most: int, until: int) -> bool:
        """Frees the kept blocks that go first, while any were last used at `until` or before. Returns whether any
        were."""
        dropped = list[PoolBlockId]()
        while len(dropped) < at_most and (run := self._next_kept(until)):
            num_left = max(len(run.blocks) - at_most + len(dropped), 0)
            if not num_left:
                del self._known[run.hashes[0]]
            del run.hashes[num_left:]
            dropped += self._cut(run)
        self._table.forget(dropped)
        self.free += dropped
        return bool(dropped)

    def _cut(self, run: Run) -> list[PoolBlockId]:
        """Takes the blocks that are not known from a run that no request lists. Returns them, the last one first."""
        num_known = len(run.hashes)
        taken = run.blocks[: num_known - 1 if num_known else None : -1]
        del run.blocks[num_known:]
        self._num_kept_by[run.owner] -= len(taken)
        if run.promised_until:
            self.num_promised -= len(taken)
            self.promises.cut(run, len(taken))
        if not num_known and run.parent:
            run.parent.num_next -= 1
        return taken

    def _keep(self, run: Run) -> None:
        self._num_entries += 1
        entries = self._kept.setdefault(run.owner, [])
        heappush(entries, (run.last_used, -run.first, self._num_entries, run))
        if len(entries) > _MAX_ENTRIES + 2 * self._num_kept_by[run.owner]:
            entries[:] = filter(_is_valid, entries)
            heapify(entries)

    # ---- promises ----------------------------------------------------------------------------------------------------

    def promise(self, hashes: Sequence[bytes], owner: str, until: float) -> bool:
        """Lets the blocks known by these hashes go after all that are not promised. Returns False and promises nothing
        if some are not known, or if the owner has too many."""
        tail, num_found = self.find(hashes, len(hashes))
        if tail is None or num_found < len(hashes):
            return False
        if num_found < tail.end:
            tail = self._split(tail, num_found)
            if not tail.is_listed and not tail.promised_until:
                self._keep(tail)
        runs = [run for run in path_to(tail) if run.promised_until < until]
        if not self.promises.has_room(owner, sum(len(run.blocks) for run in runs if not run.promised_until)):
            return False
        for run in runs:
            self.num_promised += 0 if run.is_listed or run.promised_until else len(run.blocks)
            self.promises.add(run, owner, until)
        return True

    def end_promises(self, now: float) -> None:
        """Ends the promises that end at `now` or before."""
        while (run := self.promises.next) and run.promised_until <= now:
            self._end_promise(run)

    def break_promise(self) -> bool:
        """Ends the promise that ends first. Returns whether there was one."""
        run = self.promises.next
        if run:
            self._end_promise(run)
        return run is not None

    def _end_promise(self, run: Run) -> None:
        self.promises.end(run)
        if run.blocks and not run.is_listed:
            self.num_promised -= len(run.blocks)
            self._keep(run)

    # ---- checks ------------------------------------------------------------------------------------------------------

    def check(self, allocations: Collection[Allocation]) -> None:
        """Raises unless every block is listed, kept or free, and the counts are those of these requests."""
        listed = dict.fromkeys(run for each in allocations for run in path_to(each.tail))
        kept = dict.fromkeys(run for entries in self._kept.values() for *_, run in filter(_is_valid, entries))
        kept |= dict.fromkeys(run for run in self.promises.runs if not run.is_listed)
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
        self._check_promises(runs)
        num_known = sum(len(run.hashes) for run in runs)
        if self._table.num_known != num_known or {*self._known.values()} != {
            run for run in runs if run.hashes
        }:
            raise RuntimeError(
                f"the owner table has {self._table.num_known} known blocks, and there are {num_known} "
                f"in {len(self._known)} runs"
            )

    def _check_promises(self, runs: Iterable[Run]) -> None:
        found, num_promised = Counter[str](), 0
        for run in (each for each in runs if each.promised_until):
            found[run.promised_to] += len(run.blocks)
            num_promised += 0 if run.is_listed else len(run.blocks)
            if run.parent and run.parent.promised_until < run.promised_until:
                raise RuntimeError(f"block {run.blocks[0]} is promised for longer than the block before it")
        if (+found, num_promised) != (self.promises.num_blocks, self.num_promised):
            raise RuntimeError(
                f"{self.num_promised} kept blocks of {self.promises.num_blocks.total()} are promised, "
                f"and {num_promised} of {found.total()} are found"
            )

    def _check_counts(self, allocations: Iterable[Allocation], runs: Iterable[Run]) -> None:
        needed, spares, following = Counter[Run](), Counter[Run](), Counter(run.parent for run in runs)
        for each in allocations:
            (spares if each.is_spare else needed).update(path_to(each.tail))
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
        kept = Counter[str]()
        for run in (each for each in runs if not each.is_listed):
            kept[run.owner] += len(run.blocks)
        if (
            any(run.owner and run.parent and run.parent.owner != run.owner for run in runs)
            or kept != self._num_kept_by
        ):
            raise RuntimeError(f"{self._num_kept_by} blocks are counted as kept; {kept} are")
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
