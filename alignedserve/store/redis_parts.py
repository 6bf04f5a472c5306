"""Parts of any size on Redis: read in pieces, and staged in pieces before a script uses them.

Keys: `staged:NAME`, the bytes of a future part.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any

from alignedserve.store.base import StoreLimits
from alignedserve.store.homes.base import StoreAway
from alignedserve.store.records import Lease
from alignedserve.store.redis_leases import RedisLeases
from alignedserve.store.responses import ConversationFull, Pieces, ResponseGone
from alignedserve.store.scripts import PREFIX, STAGED_BYTES_LOST, TOO_MANY_ITEMS

_STAGED = f"{PREFIX}staged:"
# Largest part, in bytes, that is sent inside the command that adds it.
SMALL_BYTES = 64 << 10
# Bytes of a larger part that are sent or fetched at once. They block the event loop for 0.3 ms (1 MiB: 2 ms). The store
# writes to its disk for each piece.
PIECE_BYTES = 256 << 10
# Seconds after which staged bytes that were not used are deleted.
STAGED_S = 600


class RedisParts:
    def __init__(
        self,
        redis: RedisLeases,
        limits: Callable[[], StoreLimits],
        check: Callable[[int, Lease | None], int],
    ) -> None:
        """`limits` returns the limits of the moment. `check` raises the error for a script's negative answer."""
        self._redis = redis
        self._limits = limits
        self._check = check

    @property
    def _byte_limits(self) -> tuple[int | str, int | str]:
        """The limits of bytes as scripts expect them: in total, and the owner's."""
        now = self._limits()
        limits = now.max_bytes, now.max_bytes_of_owner
        most, most_of_owner = ("" if limit is None else limit for limit in limits)
        return most, most_of_owner

    async def _read(self, key: str, begin: int, end: int) -> AsyncIterator[bytes]:
        """Yields the bytes between two positions. Raises ResponseGone."""
        for first in range(begin, end, PIECE_BYTES):
            last = min(first + PIECE_BYTES, end)
            piece = await self._redis.call(self._redis.piece(PREFIX + key, first, last))
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
                    await self._redis.call(self._redis.unlink([_STAGED + name for name in staged]))

    async def _stage(self, key: str, pieces: Pieces) -> None:
        offset = 0
        for block in _blocks(pieces):
            if await self._redis.call(self._redis.put_piece(key, offset, block, STAGED_S)) < offset:
                raise _lost()
            offset += len(block)

    def _checked(self, done: int, lease: Lease | None = None) -> int:
        """Returns a script's answer, or raises the error that it stands for."""
        if done == STAGED_BYTES_LOST:
            raise _lost()
        if done == TOO_MANY_ITEMS:
            raise ConversationFull
        return self._check(done, lease)

    def _run(self, script: str, *args: Any) -> Coroutine[Any, Any, Any]:
        return self._redis.call(self._redis.run(script, *args))


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


def _lost() -> StoreAway:
    return StoreAway("bytes that it was sent are not there any more")
