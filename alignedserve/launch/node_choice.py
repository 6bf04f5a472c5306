"""Which nodes of a cluster are islands: decided from the nodes that are there, without asking anyone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# A node whose island failed is tried again after so many seconds at first, and at most; each time after twice as many.
RETRY_S, MAX_RETRY_S = 10.0, 600.0


@dataclass
class _Failures:
    # When the node may be tried again, and how long it waits after the next failure.
    not_before: float
    next_s: float


@dataclass
class NodeChoice:
    # The most islands at a time; None: all nodes become islands.
    most: int | None = None
    # The ids of nodes that are islands, by the islands' numbers, which are never used again.
    chosen: dict[int, str] = field(default_factory=dict)
    _next: int = 0
    _failures: dict[str, _Failures] = field(default_factory=dict)

    def look(self, there: Sequence[str], now: float) -> tuple[dict[int, str], list[int]]:
        """Returns the nodes that become islands now, by their numbers, and the numbers of the islands whose nodes are
        gone."""
        gone = [number for number, node_id in self.chosen.items() if node_id not in there]
        for number in gone:
            del self.chosen[number]
        # A node that has gone and comes back has been started anew.
        self._failures = {node_id: found for node_id, found in self._failures.items() if node_id in there}
        come: dict[int, str] = {}
        for node_id in there:
            if self.most is not None and len(self.chosen) >= self.most:
                break
            if node_id not in self.chosen.values() and self._may_be_tried(node_id, now):
                self.chosen[self._next] = come[self._next] = node_id
                self._next += 1
        return come, gone

    def failed(self, number: int, now: float) -> None:
        """The island has failed, and its node is there as far as is known: it is let go, and tried again later."""
        node_id = self.chosen.pop(number, None)
        if node_id is not None:
            pause_s = self._failures[node_id].next_s if node_id in self._failures else RETRY_S
            self._failures[node_id] = _Failures(now + pause_s, min(2 * pause_s, MAX_RETRY_S))

    def given_back(self, number: int) -> None:
        """The island is none any more, and its node is free."""
        self.chosen.pop(number, None)

    def worked(self, number: int) -> None:
        """The island is up: what its node failed before does not matter any more."""
        if number in self.chosen:
            self._failures.pop(self.chosen[number], None)

    def _may_be_tried(self, node_id: str, now: float) -> bool:
        return node_id not in self._failures or now >= self._failures[node_id].not_before
