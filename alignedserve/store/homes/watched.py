"""A home that records whether it was reachable at the last try, and whether it accepted writes. On a full disk only
writes fail."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Literal

from alignedserve.store.homes.base import Home, Listed, StoreAway, Writer

_PROBE = b"probe"

_Kind = Literal["reading", "writing"]


class WatchedHome(Home):
    def __init__(self, home: Home) -> None:
        self._home = home
        # Which of reading and writing failed at the last try.
        self._failing: set[_Kind] = set()

    @property
    def is_down(self) -> bool:
        return bool(self._failing)

    @property
    def num_bytes(self) -> int | None:
        return self._home.num_bytes

    def writer(self, name: str) -> Writer:
        return _WatchedWriter(self, self._home.writer(name))

    async def read(self, name: str, start: int, num_bytes: int) -> bytes | None:
        with self.watching():
            return await self._home.read(name, start, num_bytes)

    async def delete(self, name: str) -> None:
        with self.watching():
            await self._home.delete(name)

    async def listed(self, folder: str) -> AsyncIterator[Sequence[Listed]]:
        with self.watching():
            async for some in self._home.listed(folder):
                yield some

    async def probe(self, name: str) -> None:
        """Writes some bytes under a unique name and deletes them. Raises StoreAway."""
        writer = self.writer(name)
        try:
            await writer.write(_PROBE)
            await writer.finish()
        finally:
            await writer.abort()
        await self.delete(name)

    @contextlib.contextmanager
    def watching(self, kind: _Kind = "reading") -> Iterator[None]:
        with self.noting(kind):
            yield
        if kind == "writing":
            self._failing.clear()
        else:
            self._failing.discard(kind)

    @contextlib.contextmanager
    def noting(self, kind: _Kind) -> Iterator[None]:
        """Records a failure. A success is not conclusive here."""
        try:
            yield
        except StoreAway:
            self._failing.add(kind)
            raise


class _WatchedWriter(Writer):
    def __init__(self, home: WatchedHome, writer: Writer) -> None:
        self._home = home
        self._writer = writer

    async def write(self, data: bytes) -> None:
        # Written bytes may stay in memory until the end.
        with self._home.noting("writing"):
            await self._writer.write(data)

    async def finish(self) -> None:
        with self._home.watching("writing"):
            await self._writer.finish()

    async def abort(self) -> None:
        await self._writer.abort()
