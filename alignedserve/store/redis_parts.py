"""Parts of any size on Redis: read in pieces, and staged in pieces before a script uses them.

Keys: `staged:NAME`, the bytes of a future part.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from alignedserve.store.homes.base import StoreAway
from alignedserve.store.records import Order
from alignedserve.store.redis_leases import RedisLeases, bytes_lost
from alignedserve.store.responses import ItemPage, Pieces, ResponseGone, Span
from alignedserve.store.scripts import PREFIX

_STAGED = f"{PREFIX}staged:"
# Largest part, in bytes, that is sent inside the command that adds it.
SMALL_BYTES = 64 << 10
# Bytes of a larger part that are sent or fetched at once. They block the event loop for 0.3 ms (1 MiB: 2 ms). The store
# writes to its disk for each piece.
PIECE_BYTES = 256 << 10
# Seconds after which staged bytes that were not used are deleted.
STAGED_S = 600


class RedisParts:
    def __init__(self, redis: RedisLeases) -> None:
        self._redis = redis

    async def _read(self, key: str, begin: int, end: int) -> AsyncIterator[bytes]:
        """Yields the bytes between two positions. Raises ResponseGone."""
        for first in range(begin, end, PIECE_BYTES):
            last = min(first + PIECE_BYTES, end)
            piece = await self._redis.piece(PREFIX + key, first, last)
            if len(piece) < last - first:
                raise ResponseGone(key.split(":")[1])
            yield piece

    @asynccontextmanager
    async def _given(self, parts: Mapping[Any, Pieces]) -> AsyncIterator[list[str | bytes]]:
        """Yields a script's arguments for new parts. Large ones are sent in advance, in pieces. Those that the script
        did not use are deleted after the block."""
        args: list[str | bytes] = []
        staged: list[str] = []
        try:
            for name, pieces in parts.items():
                if (size := sum(map(len, pieces))) <= SMALL_BYTES:
                    args += [name, "", b"".join(pieces)]
                    continue
                staged.append(secrets.token_hex(8))
                args += [name, staged[-1], str(size)]
                await self._stage(_STAGED + staged[-1], pieces)
            yield args
        finally:
            if staged:
                with suppress(StoreAway):
                    await self._redis.unlink([_STAGED + name for name in staged])

    async def _stage(self, key: str, pieces: Pieces) -> None:
        offset = 0
        for block in _blocks(pieces):
            if await self._redis.put_piece(key, offset, block, STAGED_S) < offset:
                raise bytes_lost()
            offset += len(block)

    async def _item_page(
        self, script: str, name: str, *args: Any, after: bytes | None, limit: int, order: Order
    ) -> ItemPage | None:
        return ItemPage.of(await self._found(script, name, *args, after or b"", limit, int(order == "desc")))

    async def _items(self, script: str, name: str, *args: Any) -> list[Span | None]:
        return [each and tuple(each) for each in await self._found(script, name, *args)]

    async def _found(self, script: str, name: str, *args: Any) -> Sequence[Any]:
        """Returns what a script found in a response or conversation. Raises ResponseGone."""
        found: Sequence[Any] | None = await self._redis.run(script, name, *args)
        if found is None:
            raise ResponseGone(name)
        return found


def _blocks(pieces: Pieces) -> Iterator[bytes]:
    """Yields the same bytes in blocks smaller than twice PIECE_BYTES."""
    block = bytearray()
    for piece in pieces:
        view = memoryview(piece)
        for first in range(0, len(view), PIECE_BYTES):
            block += view[first : first + PIECE_BYTES]
            if len(block) >= PIECE_BYTES:
                yield bytes(block)
                block.clear()
    if block:
        yield bytes(block)
