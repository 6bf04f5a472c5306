"""The content of files: where it is, and how it is written and read.

It is in the store (`ContentsInStore`), or outside in a directory or bucket, one file each (`ContentsApart`). Older
files are still read from the store. These rules make it safe to kill a process at any time while it writes outside
content:

- A name is used once. Each writer has its own id, even if two gateways write the same output. Only the holder of the
  job's lease commits, so the other gateway's content is never visible.
- The store reserves room under this id before the first byte (`reserve`). After the last byte the content is made
  durable and whole, and then the file is committed. So no file lacks its content.
- A file is deleted before its content.
- Content with neither file nor reservation was left by a process that was killed or could not delete it. The store
  drops a reservation that was not used for an hour. A forgotten id can't become a file any more, so any process may
  delete such content. It is searched for every hour.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from typing import Literal

from alignedserve.store.base import UNCOMMITTED_S, Store
from alignedserve.store.homes import WatchedHome, Writer
from alignedserve.store.homes.base import StoreAway
from alignedserve.store.records import FileId, FileRecord, new_file_id

# Bytes per chunk; only the last one may have fewer. It is large enough to save round trips and small enough for memory.
# Stored records count chunks of this size, so it must not change.
CHUNK_BYTES = 1 << 20
# Seconds between searches for leftover content.
SWEEP_EVERY_S = 3600.0
# Seconds for which content is never deleted, whatever the store says.
LEFT_BEHIND_S = 2 * UNCOMMITTED_S

_ID = re.compile(r"file-[0-9a-f]{24}")


class NewFile(ABC):
    """The content of an uncommitted file."""

    def __init__(self) -> None:
        self.id = new_file_id()

    @property
    def is_apart(self) -> bool:
        """Whether the content is outside the store. The file's record needs it."""
        return False

    @abstractmethod
    async def put(self, number: int, data: bytes) -> None:
        """Writes the next chunk. It may be repeated after StoreAway, but not after BrokenOff. Raises StoreFull."""

    @abstractmethod
    async def finish(self) -> None:
        """Makes the content durable and whole, so that the file may be committed. Raises BrokenOff."""

    @abstractmethod
    async def drop(self) -> None:
        """Deletes the content, unless the file was committed. Safe to repeat. Content that can't be deleted now is
        deleted later."""


class Contents(ABC):
    def __init__(self, store: Store) -> None:
        self._store = store

    @abstractmethod
    def new_file(self, owner: str, is_bounded: bool = True) -> NewFile:
        """Without `is_bounded`, the store's limits are ignored."""

    @abstractmethod
    async def chunk(self, file: FileRecord, number: int) -> bytes | None:
        """Returns the chunk; None if the file is gone."""

    async def delete(self, file_id: FileId) -> Literal["deleted", "absent", "in_use"]:
        """Deletes the file, then its content; see Store.delete_file."""
        return await self._store.delete_file(file_id)

    async def tidy(self, now: float) -> None:
        """Deletes some unneeded data. Raises StoreAway."""
        await self._store.drop_lapsed(now)
        for file_id in await self._store.expired_files(now):
            await self.delete(file_id)


class ContentsInStore(Contents):
    def new_file(self, owner: str, is_bounded: bool = True) -> NewFile:
        return _NewInStore(self._store, owner, is_bounded)

    async def chunk(self, file: FileRecord, number: int) -> bytes | None:
        if file.is_apart:
            raise StoreAway(f"{file.id} is in a directory or a bucket, which --files-at does not name now")
        return await self._store.chunk(file.id, number)


class _NewInStore(NewFile):
    def __init__(self, store: Store, owner: str, is_bounded: bool) -> None:
        super().__init__()
        self._store = store
        self._owner = owner
        self._is_bounded = is_bounded

    async def put(self, number: int, data: bytes) -> None:
        await self._store.put_chunk(self.id, self._owner, number, data, is_bounded=self._is_bounded)

    async def finish(self) -> None:
        return

    async def drop(self) -> None:
        await self._store.drop_chunks(self.id)


class ContentsApart(Contents):
    """Content in a directory or bucket. Each store has its own folder there."""

    def __init__(self, store: Store, home: WatchedHome) -> None:
        super().__init__(store)
        self._home = home
        self._folder = ""
        self._next_sweep = 0.0

    def new_file(self, owner: str, is_bounded: bool = True) -> NewFile:
        return _NewApart(self, self._store, self._home, owner, is_bounded)

    async def chunk(self, file: FileRecord, number: int) -> bytes | None:
        if not file.is_apart:
            return await self._store.chunk(file.id, number)
        start = number * CHUNK_BYTES
        num_bytes = min(CHUNK_BYTES, file.num_bytes - start)
        return await self._home.read(await self.name(file.id), start, num_bytes)

    async def delete(self, file_id: FileId) -> Literal["deleted", "absent", "in_use"]:
        done = await super().delete(file_id)
        if done == "deleted":
            # A failed deletion is left to a later sweep.
            with contextlib.suppress(StoreAway):
                await self._home.delete(await self.name(file_id))
        return done

    async def tidy(self, now: float) -> None:
        await super().tidy(now)
        if self._home.is_down:
            # The content of a process that dies here is swept later.
            with contextlib.suppress(StoreAway):
                await self._home.probe(await self.name(new_file_id()))
        # The clock may have been set back.
        if not now < self._next_sweep <= now + SWEEP_EVERY_S:
            await self._sweep(now)
            self._next_sweep = now + SWEEP_EVERY_S

    async def name(self, file_id: str) -> str:
        if not self._folder:
            self._folder = f"store-{await self._store.identity()}"
        return f"{self._folder}/{file_id}"

    async def _sweep(self, now: float) -> None:
        """Deletes leftover content."""
        async for found in self._home.listed(await self.name("")):
            old = [each.name for each in found if each.changed_at < now - LEFT_BEHIND_S]
            for file_id in await self._store.forgotten([FileId(each) for each in old if _ID.fullmatch(each)]):
                await self._home.delete(await self.name(file_id))


class _NewApart(NewFile):
    def __init__(
        self, contents: ContentsApart, store: Store, home: WatchedHome, owner: str, is_bounded: bool
    ) -> None:
        super().__init__()
        self._contents = contents
        self._store = store
        self._home = home
        self._owner = owner
        self._is_bounded = is_bounded
        self._num_bytes = 0
        # An empty file needs neither content nor a writer.
        self._writer: Writer | None = None

    @property
    def is_apart(self) -> bool:
        return self._writer is not None

    async def put(self, number: int, data: bytes) -> None:
        num_bytes = self._num_bytes + len(data)
        await self._store.reserve(self.id, self._owner, num_bytes, self._is_bounded)
        if self._writer is None:
            self._writer = self._home.writer(await self._contents.name(self.id))
        await self._writer.write(data)
        self._num_bytes = num_bytes

    async def finish(self) -> None:
        if self._writer:
            await self._writer.finish()

    async def drop(self) -> None:
        if self._writer:
            await self._writer.abort()
        # From here on the file can't be committed. If it already was, its content stays.
        await self._store.drop_chunks(self.id)
        if self._writer and await self._store.forgotten([self.id]):
            with contextlib.suppress(StoreAway):
                await self._home.delete(await self._contents.name(self.id))
