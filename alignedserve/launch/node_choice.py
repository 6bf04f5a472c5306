"""Decides which nodes of a cluster become islands. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

# seconds until a node is tried again after its island failed: at first, and at most. The pause doubles each time.
RETRY_S, MAX_RETRY_S = 10.0, 600.0


@dataclass
class _Failures:
    # when the node may be tried again, and the pause after its next failure
    not_before: float
    next_s: float


@dataclass
class NodeChoice:
    # the most islands at a time; None: all nodes become islands
    most: int | None = None
    # the ids of nodes that are islands, by the islands' numbers; a number is never used again
    chosen: dict[int, str] = field(default_factory=dict)
    _next: int = 0
    _failures: dict[str, _Failures] = field(default_factory=dict)

    def look(self, there: Sequence[str], now: float) -> tuple[dict[int, str], list[int]]:
        """Returns the nodes that become islands now, by their new numbers, and the numbers of islands that have lost
        their node."""
        gone = [number for number, node_id in self.chosen.items() if node_id not in there]
        for number in gone:
            del self.chosen[number]
        # A node that returns after a loss was started anew.
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
        """Notes that an island failed. Its node is tried again later."""
        node_id = self.chosen.pop(number, None)
        if node_id is not None:
            pause_s = self._failures[node_id].next_s if node_id in self._failures else RETRY_S
            self._failures[node_id] = _Failures(now + pause_s, min(2 * pause_s, MAX_RETRY_S))

    def given_back(self, number: int) -> None:
        """Notes that an island has ended. Its node is free."""
        self.chosen.pop(number, None)

    def worked(self, number: int) -> None:
        """Notes that an island is up, and forgets earlier failures of its node."""
        if number in self.chosen:
            self._failures.pop(self.chosen[number], None)

    def _may_be_tried(self, node_id: str, now: float) -> bool:
        return node_id not in self._failures or now >= self._failures[node_id].not_before
