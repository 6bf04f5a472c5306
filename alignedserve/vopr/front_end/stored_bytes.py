"""The bytes that a store holds per owner, and whether there is room for more."""

from __future__ import annotations

from collections import Counter

from alignedserve.store.base import StoreLimits


class StoredBytes:
    def __init__(self, limits: StoreLimits, is_apart: bool = False) -> None:
        """With `is_apart`, counts content that is kept apart."""
        self._limits = limits
        self._is_apart = is_apart
        self._max, self._max_of_owner = (
            (limits.max_bytes_apart, limits.max_bytes_apart_of_owner)
            if is_apart
            else (limits.max_bytes, limits.max_bytes_of_owner)
        )
        self._of: Counter[str] = Counter()

    def of(self, owner: str) -> int:
        return self._of[owner]

    def add(self, owner: str, more: int) -> None:
        """Adds to the owner's bytes. `more` is negative for deletions."""
        self._of[owner] += more

    def add_if_room(self, owner: str, more: int, is_bounded: bool = True) -> None:
        """Raises StoreFull. Without a bound there is always room."""
        if is_bounded and more > 0:
            self._check(owner, more)
        self.add(owner, more)

    def _check(self, owner: str, more: int) -> None:
        if self._max_of_owner is not None and self._of[owner] + more > self._max_of_owner:
            raise self._limits.full(is_owners=True, is_apart=self._is_apart)
        if self._max is not None and self._of.total() + more > self._max:
            raise self._limits.full(is_owners=False, is_apart=self._is_apart)
