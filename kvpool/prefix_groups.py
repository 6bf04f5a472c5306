"""Candidates with the same prefix: they go to one decode instance together, which then holds their prefix once.

The router names the prefix group of each request. A search of the tree finds requests by length. Whichever of them
comes first brings the candidates of its group along, before the next one is taken. So a batch has few prefixes, and
more requests for the same blocks. Requests that join a running batch are first those with a prefix that is there.

The groups of real time have no number, because it is ordered by its deadlines alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from alignedserve.kvpool.batch_builder import BatchLimits, TailOf
from alignedserve.kvpool.quadtree import QuadTree
from alignedserve.kvpool.runs import path_to
from alignedserve.types import InstanceId, RequestKey

# Requests of a group, in order of arrival.
_Members = dict[RequestKey, None]


class PrefixGroups:
    def __init__(self, tail_of: TailOf) -> None:
        self._tail_of = tail_of
        # The group of each request, and the decode instance that it was given to; None: it is a candidate.
        self._of: dict[RequestKey, tuple[int, InstanceId | None]] = {}
        # The requests of each group at each of these places.
        self._at: dict[InstanceId | None, dict[int, _Members]] = {None: {}}

    def __len__(self) -> int:
        return len(self._of)

    def add(self, key: RequestKey, group: int) -> None:
        """Adds a candidate. `group`: 0 if it has no prefix in common with others."""
        self.discard(key)
        if group:
            self._put(key, group, None)

    def give(self, keys: Iterable[RequestKey], decode: InstanceId) -> None:
        """Records that these candidates go to the decode instance."""
        for key in keys:
            if found := self._of.get(key):
                self.discard(key)
                self._put(key, found[0], decode)

    def discard(self, key: RequestKey) -> None:
        """Safe to repeat."""
        if found := self._of.pop(key, None):
            group, place = found
            groups = self._at[place]
            del groups[group][key]
            if not groups[group]:
                del groups[group]

    def _put(self, key: RequestKey, group: int, place: InstanceId | None) -> None:
        self._of[key] = group, place
        self._at.setdefault(place, {}).setdefault(group, {})[key] = None

    def beside(self, decode: InstanceId) -> list[tuple[RequestKey, Iterable[RequestKey]]]:
        """Returns a request for each group at this decode instance with candidates, and these candidates."""
        here, waiting = self._at.get(decode, {}), self._at[None]
        return [(next(iter(here[group])), waiting[group]) for group in here if group in waiting]

    def mates(self, key: RequestKey) -> Iterable[RequestKey]:
        """Returns the candidates of this candidate's group, itself included."""
        found = self._of.get(key)
        return self._at[None][found[0]] if found else ()

    def num_common(self, one: RequestKey, other: RequestKey) -> int:
        """Returns the number of leading blocks that both requests list."""
        runs = {*path_to(self._tail_of(one))}
        return next((run.end for run in path_to(self._tail_of(other)) if run in runs), 0)

    def check(self, candidates: QuadTree) -> None:
        """Raises RuntimeError if a candidate of a group is not in the tree, or if a count is wrong."""
        num_listed = sum(len(members) for groups in self._at.values() for members in groups.values())
        lost = [key for members in self._at[None].values() for key in members if key not in candidates]
        if lost or num_listed != len(self._of):
            raise RuntimeError(
                f"candidates {lost} have a prefix group and are not in the tree, "
                f"or {num_listed} requests are in groups, not {len(self._of)}"
            )


class GroupedBatch:
    """Requests that are chosen for a decode instance, group by group. A block that several list counts once."""

    def __init__(self, tree: QuadTree, groups: PrefixGroups, limits: BatchLimits) -> None:
        self._tree = tree
        self._groups = groups
        self._blocks_left = limits.max_blocks
        self._max_requests = limits.max_requests
        self._chosen: dict[RequestKey, None] = {}

    @property
    def keys(self) -> list[RequestKey]:
        return [*self._chosen]

    def join(self, beside: Iterable[tuple[RequestKey, Iterable[RequestKey]]]) -> None:
        """Takes candidates that share the prefix of a request which is not one of them."""
        for there, candidates in beside:
            self._take_while_fitting(candidates, there)

    def take(self, keys: Sequence[RequestKey], urgent_before_s: float = -math.inf) -> None:
        """Takes these requests in order, each followed by the others of its group. Those that are due by
        `urgent_before_s` go before all others."""
        for key in keys:
            if self._tree.due_s_of(key) <= urgent_before_s:
                self._take(key)
        for key in keys:
            if key in self._chosen or self._take(key):
                self._take_while_fitting(self._groups.mates(key), key)

    def _take_while_fitting(self, keys: Iterable[RequestKey], beside: RequestKey) -> None:
        """Takes requests until one does not fit. A group may have thousands, and all are about as long."""
        for key in keys:
            if key not in self._chosen and not self._take(key, beside):
                return

    def _take(self, key: RequestKey, beside: RequestKey | None = None) -> bool:
        """Takes the request if it is not taken yet, and if there is room for what it does not share with the other
        one."""
        if key in self._chosen or len(self._chosen) >= self._max_requests:
            return False
        num_blocks = self._tree.blocks_of(key)
        if beside is not None:
            num_blocks -= self._tree.span.num_groups * self._groups.num_common(key, beside)
        if num_blocks > self._blocks_left:
            return False
        self._chosen[key] = None
        self._blocks_left -= num_blocks
        return True
