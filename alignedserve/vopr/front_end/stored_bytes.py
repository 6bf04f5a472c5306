"""How many bytes a store has, of whom, and whether there is room for more."""

from __future__ import annotations

from collections import Counter

from alignedserve.store.base import StoreLimits


class StoredBytes:
    def __init__(self, limits: StoreLimits) -> None:
        self._limits = limits
        self._of: Counter[str] = Counter()

    def of(self, owner: str) -> int:
        return self._of[owner]

    def add(self, owner: str, more: int) -> None:
        """`more` is negative for what was deleted."""
        self._of[owner] += more

    def add_if_room(self, owner: str, more: int, is_bounded: bool = True) -> None:
        """Raises StoreFull. What is not bounded has always room."""
        if is_bounded and more > 0:
            self._check(owner, more)
        self.add(owner, more)

    def _check(self, owner: str, more: int) -> None:
        limits = self._limits
        if limits.max_bytes_of_owner is not None and self._of[owner] + more > limits.max_bytes_of_owner:
            raise limits.full(is_owners=True)
        if limits.max_bytes is not None and self._of.total() + more > limits.max_bytes:
            raise limits.full(is_owners=False)
