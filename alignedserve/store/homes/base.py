"""The interface of a home for content.

A name is a folder and a file in it. Every asynchronous method raises StoreAway if the home is unreachable or too slow.
It may then be repeated, except for those of Writer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass


class StoreAway(Exception):
    """The store, or a home, can't be reached now."""


class BrokenOff(StoreAway):
    """The home became unreachable during a write. The content is lost and must be written again from its beginning."""


@dataclass(frozen=True)
class Listed:
    # The name without its folder.
    name: str
    # Seconds since 1970.
    changed_at: float


class Writer(ABC):
    """Writes content once. It is invisible until it is whole."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Appends bytes. Raises BrokenOff."""

    @abstractmethod
    async def finish(self) -> None:
        """Makes the content whole and durable. Raises BrokenOff; it is then unknown whether the content exists."""

    @abstractmethod
    async def abort(self) -> None:
        """Deletes the written bytes, as far as possible now. Does nothing after `finish`. Never raises."""


class Home(ABC):
    @property
    @abstractmethod
    def num_bytes(self) -> int | None:
        """The size of its disk; None if it has no fixed size."""

    @abstractmethod
    def writer(self, name: str) -> Writer:
        """Returns a writer of new content. Raises StoreAway if there are too many writers."""

    @abstractmethod
    async def read(self, name: str, start: int, num_bytes: int) -> bytes | None:
        """Returns `num_bytes` bytes; None if the content does not exist or is shorter."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Deletes the content, whole or not. Does nothing if there is none."""

    @abstractmethod
    def listed(self, folder: str) -> AsyncIterator[Sequence[Listed]]:
        """Yields the contents of a folder, some at a time. It includes partial content where that is visible."""
