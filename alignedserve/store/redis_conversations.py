"""Conversations on Redis.

Keys: `conversation:ID`, a hash of its head and counts; `conversation-items:ID:LAYOUT`, its items;
`conversation-index:ID`, a line per item; `appended:NAME`, additions of the last minutes; `expiring-conversations`, all
conversations by expiry.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from alignedserve.store import conversation_scripts as scripts
from alignedserve.store.base import NUM_AT_A_TIME
from alignedserve.store.records import Order
from alignedserve.store.redis_parts import SMALL_BYTES, RedisParts
from alignedserve.store.responses import (
    ConversationHead,
    ConversationId,
    ConversationStore,
    ItemPage,
    NewItems,
    Pieces,
    Span,
)


class RedisConversations(RedisParts, ConversationStore):
    async def add(self, head: ConversationHead, new: NewItems, expires_at: int) -> None:
        args = [head.id, head.owner, head.created_at, head.state, expires_at, *self._redis.byte_limits()]
        async with self._sent(head.owner, [new]) as sent:
            await self._redis.done(scripts.ADD, *args, *sent)

    async def head(self, conversation_id: ConversationId) -> ConversationHead | None:
        found = await self._redis.run(scripts.HEAD, conversation_id)
        if found is None:
            return None
        owner, created_at, state, layout, num_items, *places = found
        spans = list(zip(places[::2], places[1::2], strict=True))
        return ConversationHead(
            conversation_id, owner.decode(), int(created_at), state, int(layout), int(num_items), spans
        )

    def pieces(self, head: ConversationHead, begin: int, end: int) -> AsyncIterator[bytes]:
        return self._read(f"conversation-items:{head.id}:{head.layout}", begin, end)

    async def item_page(
        self, head: ConversationHead, after: bytes | None, limit: int, order: Order
    ) -> ItemPage | None:
        args = scripts.ITEM_PAGE, head.id, head.layout
        return await self._item_page(*args, after=after, limit=limit, order=order)

    async def items(self, head: ConversationHead, names: Sequence[bytes]) -> list[Span | None]:
        return await self._items(scripts.NAMED_ITEMS, head.id, head.layout, *names)

    async def put_state(self, head: ConversationHead, state: bytes) -> None:
        await self._redis.done(scripts.PUT_STATE, head.id, state, *self._redis.byte_limits())

    async def append(
        self,
        head: ConversationHead,
        new: Sequence[NewItems],
        name: str,
        expires_at: int,
        max_items: int,
        max_bytes: int,
    ) -> bool:
        args = [head.id, name, expires_at, max_items, max_bytes, *self._redis.byte_limits()]
        async with self._sent(head.owner, new) as sent:
            return bool(await self._redis.done(scripts.APPEND, *args, *sent))

    async def delete_item(self, head: ConversationHead, name: bytes) -> None:
        await self._redis.run(scripts.DELETE_ITEM, head.id, name)

    async def delete(self, head: ConversationHead) -> None:
        await self._redis.run(scripts.DELETE, head.id)

    async def drop_expired(self, now: float) -> None:
        await self._redis.run(scripts.DROP_EXPIRED, now, NUM_AT_A_TIME)

    @asynccontextmanager
    async def _sent(self, owner: str, new: Sequence[NewItems]) -> AsyncIterator[list[str | bytes]]:
        """Yields the script's arguments for these items. Raises StoreFull."""
        size = sum(each.num_bytes for each in new)
        if size > SMALL_BYTES:
            # Checked first, so that refused items are not sent.
            await self._redis.done(scripts.ADMIT, owner, size, *self._redis.byte_limits())
        parts: dict[str, Pieces] = {}
        for number, each in enumerate(new):
            parts |= {f"items{number}": each.items, f"index{number}": [each.index]}
        async with self._given(parts) as given:
            yield given
