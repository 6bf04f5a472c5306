"""The interface of a home of content.

A name is a folder and a file in it. Every method that is asynchronous raises StoreAway when the home can't be reached,
or is too slow; it may be repeated then, but for a Writer's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from alignedserve.store.base import StoreAway


class BrokenOff(StoreAway):
    """The home could not be reached while content was being written: what was written is lost, and has to be written
    again from its beginning."""


@dataclass(frozen=True)
class Listed:
    # The name without its folder.
    name: str
    # Seconds since 1970.
    changed_at: float


class Writer(ABC):
    """Writes content once. Nobody sees any of it before it is whole."""

    @abstractmethod
    async def write(self, data: bytes) -> None:
        """Adds some bytes. Raises BrokenOff."""

    @abstractmethod
    async def finish(self) -> None:
        """Makes the content whole and durable. Raises BrokenOff; whether the content is there is unknown then."""

    @abstractmethod
    async def abort(self) -> None:
        """Deletes what was written, as far as that is possible now; does nothing after `finish`. Does not raise."""


class Home(ABC):
    @property
    @abstractmethod
    def num_bytes(self) -> int | None:
        """Returns the size of its disk; None: it has no size."""

    @abstractmethod
    def writer(self, name: str) -> Writer:
        """Returns a writer of content that is not there yet. Raises StoreAway if too many write now."""

    @abstractmethod
    async def read(self, name: str, start: int, num_bytes: int) -> bytes | None:
        """Returns so many bytes; None: the content is not there, or has fewer."""

    @abstractmethod
    async def delete(self, name: str) -> None:
        """Deletes the content, and what is there of it if it is not whole. Does nothing if there is none."""

    @abstractmethod
    def listed(self, folder: str) -> AsyncIterator[Sequence[Listed]]:
        """Yields what is in a folder, some at a time: whole content, and also what is not whole if that can be
        seen."""
