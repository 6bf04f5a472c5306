"""Requests with a number each, summed up by class as they come and go. Pure.

Sums are asked for with each event: that must take as long for one request as for thousands.
"""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.types import RequestKey


class TokenCounts:
    def __init__(self) -> None:
        # of each request: its number, and whether it is real time
        self._numbers: dict[RequestKey, tuple[int, bool]] = {}
        self._counts = {True: 0, False: 0}
        self._sums = {True: 0, False: 0}

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[RequestKey]:
        return iter(self._numbers)

    def __contains__(self, key: RequestKey) -> bool:
        return key in self._numbers

    def put(self, key: RequestKey, number: int, is_rt: bool) -> None:
        """In place of the number that it had, if it had one."""
        self.discard(key)
        self._numbers[key] = number, is_rt
        self._counts[is_rt] += 1
        self._sums[is_rt] += number

    def discard(self, key: RequestKey) -> None:
        """Safe to repeat."""
        if found := self._numbers.pop(key, None):
            number, is_rt = found
            self._counts[is_rt] -= 1
            self._sums[is_rt] -= number

    def count(self, is_rt: bool) -> int:
        return self._counts[is_rt]

    def sum(self, is_rt: bool) -> int:
        return self._sums[is_rt]

    @property
    def total(self) -> int:
        return self._sums[True] + self._sums[False]
