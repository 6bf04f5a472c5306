"""Responses on Redis.

Keys: `response-head:ID`, a head; `response-part:ID:NAME`, a part; `open:responses`, unfinished ones by age;
`unanswered@OWNER`, an owner's unfinished ones by age; `asking`, the owners of these by their last turn;
`expiring-heads`, all responses by expiry; and the keys of leases (redis_leases.py).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence

import msgspec

from alignedserve.store.base import NUM_AT_A_TIME
from alignedserve.store.deliveries import Delivery
from alignedserve.store.records import Lease, Order
from alignedserve.store.redis_conversations import RedisConversations
from alignedserve.store.redis_deliveries import delivery_args
from alignedserve.store.redis_leases import LeasedOnRedis
from alignedserve.store.redis_parts import SMALL_BYTES, RedisParts
from alignedserve.store.response_scripts import (
    ADD,
    ADMIT,
    DELETE,
    ITEM_PAGE,
    NAMED_ITEMS,
    REPLACE,
    TAKE,
)
from alignedserve.store.responses import (
    ConversationStore,
    ItemPage,
    Part,
    Pieces,
    ResponseHead,
    ResponseId,
    ResponseStore,
    Span,
    Turn,
    sizes_of,
)
from alignedserve.store.scripts import BEGIN_LINES, PREFIX

_HEAD = f"{PREFIX}response-head:"
_EXPIRING = f"{PREFIX}expiring-heads"
# The line number of a response. Jobs have many lines, a response has one.
_LINE = 1


class RedisResponses(RedisParts, LeasedOnRedis, ResponseStore):
    @property
    def conversations(self) -> ConversationStore:
        return RedisConversations(self._redis)

    async def add(self, head: ResponseHead, parts: Mapping[Part, Pieces], turn: Turn | None = None) -> None:
        record, is_open, limits = _encode(head), int(not head.is_over), self._redis.open_limits()
        num_turn_bytes = _num_bytes_of(turn, parts) if turn else 0
        size = len(record) + sum(sizes_of(parts).values()) + num_turn_bytes
        if size > SMALL_BYTES:
            # Checked first, so that refused parts are not sent.
            await self._redis.done(ADMIT, head.owner, is_open, size, *limits)
        args = [record, head.id, head.owner, is_open, head.created_at, head.expires_at, *limits]
        async with self._given(parts) as given:
            await self._redis.done(ADD, *args, *_turn_args(turn), num_turn_bytes, *given)

    async def head(self, response_id: ResponseId) -> ResponseHead | None:
        found = await self._redis.get(_HEAD + response_id)
        return None if found is None else msgspec.msgpack.decode(found, type=ResponseHead)

    async def pieces(
        self, head: ResponseHead, part: Part, begin: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        end = head.size_of(part) if end is None else end
        async for piece in self._read(f"response-part:{head.id}:{part}", begin, end):
            yield piece

    async def item_page(
        self, response_id: ResponseId, after: bytes | None, limit: int, order: Order
    ) -> ItemPage | None:
        return await self._item_page(ITEM_PAGE, response_id, after=after, limit=limit, order=order)

    async def items(self, response_id: ResponseId, names: Sequence[bytes]) -> list[Span | None]:
        return await self._items(NAMED_ITEMS, response_id, *names)

    async def replace(
        self,
        old: ResponseHead,
        new: ResponseHead,
        lease: Lease | None,
        deliveries: Sequence[Delivery] = (),
        parts: Mapping[Part, Pieces] | None = None,
        turn: Turn | None = None,
    ) -> bool:
        args = [lease.token if lease else "", new.id, _encode(old), _encode(new), new.owner, int(new.is_over)]
        async with self._given(parts or {}) as given:
            args += [*self._redis.byte_limits(), len(parts or {}), *_turn_args(turn), *given]
            return bool(await self._redis.done(REPLACE, *args, *delivery_args(deliveries), lease=lease))

    async def delete(self, head: ResponseHead) -> None:
        await self._redis.run(DELETE, head.id, head.owner)

    async def expired(self, now: float) -> list[ResponseHead]:
        ids = await self._redis.due(_EXPIRING, now, NUM_AT_A_TIME)
        found = [await self.head(ResponseId(each)) for each in ids]
        return [head for head in found if head]

    async def take(self, holder: str, seconds: float, count: int, max_of_owner: int) -> list[Lease]:
        return await self._redis.taken(TAKE, holder, seconds, count, max_of_owner)

    async def begin(self, lease: Lease) -> int:
        await self._redis.done(BEGIN_LINES, lease.token, lease.id, _LINE, lease=lease)
        return int(await self._redis.field(f"{PREFIX}falls:{lease.id}", str(_LINE)) or 0)


def _turn_args(turn: Turn | None) -> list[str | bytes | int]:
    if turn is None:
        return [""] * 6
    spans = " ".join(f"{begin} {end}" for begin, end in turn.output_spans)
    limits = [turn.max_items, turn.max_bytes]
    return [turn.conversation_id, turn.expires_at, *limits, turn.output_index, spans]


def _num_bytes_of(turn: Turn, parts: Mapping[Part, Pieces]) -> int:
    sizes = sizes_of(parts)
    num_said = sum(end - begin for begin, end in turn.output_spans)
    return sizes["input_items"] + sizes["item_index"] + num_said + len(turn.output_index)


def _encode(head: ResponseHead) -> bytes:
    return msgspec.msgpack.encode(head)
