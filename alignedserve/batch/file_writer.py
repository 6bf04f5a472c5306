"""Writes a file of the store. Whole chunks go to its content, and the rest waits here."""

from __future__ import annotations

import contextlib
import time

from alignedserve.store import FileRecord, StoreAway
from alignedserve.store.contents import CHUNK_BYTES, NewFile
from alignedserve.store.records import Purpose
from alignedserve.store.retry import retried


class FileWriter:
    def __init__(self, content: NewFile, owner: str, is_patient: bool = False) -> None:
        """With `is_patient`, it waits while the store is away."""
        self._content = content
        self._owner = owner
        self._is_patient = is_patient
        self._buffer = bytearray()
        self._num_chunks = 0
        self.num_bytes = 0

    async def add(self, data: bytes | memoryview) -> None:
        self._buffer += data
        self.num_bytes += len(data)
        while len(self._buffer) >= CHUNK_BYTES:
            await self._put(CHUNK_BYTES)

    async def close(self, filename: str, purpose: Purpose, kept_s: int | None) -> FileRecord:
        """Writes the rest. Returns the file, which is not committed. `kept_s` is the time for which it is kept."""
        if self._buffer:
            await self._put(len(self._buffer))
        await self._content.finish()
        now = int(time.time())
        return FileRecord(
            self._content.id,
            filename,
            purpose,
            self.num_bytes,
            self._num_chunks,
            now,
            None if kept_s is None else now + kept_s,
            self._owner,
            self._content.is_apart,
        )

    async def drop(self) -> None:
        """While the store is away, the content expires by itself."""
        with contextlib.suppress(StoreAway):
            await self._content.drop()

    async def _put(self, size: int) -> None:
        chunk = bytes(self._buffer[:size])
        if self._is_patient:
            await retried(self._content.put, self._num_chunks, chunk)
        else:
            await self._content.put(self._num_chunks, chunk)
        del self._buffer[:size]
        self._num_chunks += 1
