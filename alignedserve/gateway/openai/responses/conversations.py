"""Stored conversations. Their items can be large, so they are only moved here, in pieces, and never decoded."""

from __future__ import annotations

import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.http.json_pieces import Piece
from alignedserve.gateway.http.reading import Share, too_large
from alignedserve.gateway.openai.responses.body import MAX_RESPONSE_ID_CHARS
from alignedserve.gateway.openai.responses.conversation_bodies import Given
from alignedserve.gateway.openai.responses.items import MAX_ITEMS
from alignedserve.gateway.openai.responses.output import Output, spans_without_logprobs
from alignedserve.store import (
    ConversationFull,
    ConversationHead,
    ConversationId,
    ConversationStore,
    NewItems,
    ResponseGone,
    StoreFull,
    Turn,
)
from alignedserve.store.responses import Span
from alignedserve.store.retry import repeated

# Seconds that a conversation is stored after its last addition: as long as responses.
KEPT_S = 30 * 86400
# How often a conversation is read again if it changes while it is read.
MAX_LOOKS = 3
# Items and bytes that responses may add, in multiples of what a conversation may have to be continued. So a single turn
# is never refused at its end, unless others have ended meanwhile.
MAX_GROWTH = 2
_ID = re.compile(rf"conv_[a-zA-Z0-9_-]{{1,{MAX_RESPONSE_ID_CHARS}}}")

Result = TypeVar("Result")


class KeptConversations:
    def __init__(self, store: ConversationStore | None, max_body_bytes: int) -> None:
        """`max_body_bytes` is the largest size of a body together with the conversation before it."""
        self._store = store
        self._max_body_bytes = max_body_bytes

    @property
    def store(self) -> ConversationStore:
        """The store. Raises ApiError if there is none."""
        if self._store is None:
            raise ApiError(400, "This server stores no conversations.")
        return self._store

    async def add(self, given: Given, owner: str) -> ConversationHead:
        """Stores a new conversation. Raises ApiError."""
        name, now = ConversationId(f"conv_{given.stem}"), int(time.time())
        head = ConversationHead(name, owner, now, state_of(name, now, given.metadata))
        try:
            await self.store.add(head, NewItems([given.items], given.index), now + KEPT_S)
        except StoreFull as error:
            raise storage_full(error) from None
        return head

    async def find(
        self, conversation_id: str, owner: str, param: str = "conversation_id"
    ) -> ConversationHead:
        """Returns the conversation. Raises the same ApiError for one that does not exist and for another owner's."""
        head = None
        if self._store is not None and _ID.fullmatch(conversation_id):
            head = await self._store.head(ConversationId(conversation_id))
        if head is None or head.owner != owner:
            raise not_found(conversation_id, param)
        return head

    async def append(self, head: ConversationHead, new: Sequence[NewItems]) -> None:
        """Adds items. Raises ApiError and StoreAway."""
        if not await self._append(head, new, secrets.token_hex(12), growth=1):
            raise not_found(head.id)

    async def append_turn(
        self, conversation_id: str, owner: str, new: Sequence[NewItems], response_id: str
    ) -> None:
        """Adds the items of a response that is not stored itself. Does nothing if the conversation was deleted. Raises
        ApiError and StoreAway."""
        head = await repeated(self.store.head, ConversationId(conversation_id))
        if head is not None and head.owner == owner:
            await self._append(head, new, response_id, MAX_GROWTH)

    async def _append(self, head: ConversationHead, new: Sequence[NewItems], name: str, growth: int) -> bool:
        """Adds items. `name` identifies this addition when it is retried while the store is away. Returns False if the
        conversation was deleted. Raises ApiError and StoreAway."""
        until, most = int(time.time()) + KEPT_S, (growth * MAX_ITEMS, growth * self._max_body_bytes)
        try:
            return await repeated(self.store.append, head, new, name, until, *most)
        except StoreFull as error:
            raise storage_full(error) from None
        except ConversationFull:
            raise self.full() from None

    async def put_metadata(self, head: ConversationHead, metadata: bytes) -> ConversationHead:
        """Replaces the metadata, and returns the conversation. Raises ApiError."""
        try:
            await self.store.put_state(head, state_of(head.id, head.created_at, metadata))
        except StoreFull as error:
            raise storage_full(error) from None
        return await self.find(head.id, head.owner)

    async def looked_at(
        self,
        conversation_id: str,
        owner: str,
        look: Callable[[ConversationHead], Awaitable[Result]],
        param: str = "conversation_id",
    ) -> Result:
        """Returns the result of `look` on the conversation. If that raises ResponseGone, the conversation is read
        again. Raises ApiError."""
        for _ in range(MAX_LOOKS):
            head = await self.find(conversation_id, owner, param)
            try:
                return await look(head)
            except ResponseGone:
                continue
        raise unavailable("the conversation is being changed")

    async def items(
        self, conversation_id: str, owner: str, share: Share, num_body_bytes: int
    ) -> tuple[list[Piece], int]:
        """Returns all items as a JSON array, in pieces, and their size. The size is added to `share` before they are
        read. The call's body has `num_body_bytes`. Raises ApiError."""

        async def read(head: ConversationHead) -> tuple[list[Piece], int]:
            self._check_size(head, num_body_bytes)
            share.add(head.num_bytes)
            pieces: list[Piece] = [b"["]
            try:
                for number, (begin, end) in enumerate(head.spans):
                    pieces.append(b"," * (number > 0))
                    pieces += [piece async for piece in self.store.pieces(head, begin, end)]
            except BaseException:
                share.add(-head.num_bytes)
                raise
            return [*pieces, b"]"], head.num_bytes

        return await self.looked_at(conversation_id, owner, read, "conversation")

    def turn_of(self, conversation_id: str, output: Output) -> Turn:
        """Returns what a response with this output adds to its conversation."""
        return Turn(
            ConversationId(conversation_id),
            output.index(),
            said_in(output),
            int(time.time()) + KEPT_S,
            MAX_GROWTH * MAX_ITEMS,
            MAX_GROWTH * self._max_body_bytes,
        )

    def full(self) -> ApiError:
        message = (
            f"a conversation may have at most {MAX_ITEMS} items, and {self._max_body_bytes} bytes of them"
        )
        return ApiError(413, f"{message}: delete some", param="conversation", code="conversation_full")

    def _check_size(self, head: ConversationHead, num_body_bytes: int) -> None:
        if head.num_items > MAX_ITEMS:
            raise self.full()
        if head.num_bytes + num_body_bytes > self._max_body_bytes:
            raise too_large(self._max_body_bytes, "with the conversation before it, ")


def said_in(output: Output) -> list[Span]:
    """Returns the spans of the items in the output's bytes, without log-probabilities."""
    if not output.num_logprob_bytes:
        return [(0, output.num_bytes)] if output.num_bytes else []
    return [*spans_without_logprobs(output.places, output.num_bytes)]


def said_pieces(output: Output) -> list[Piece]:
    """Returns the bytes of these spans."""
    found: list[Piece] = []
    spans, at = iter(said_in(output)), 0
    begin, end = next(spans, (0, 0))
    for piece in output.items:
        view, last = memoryview(piece), at + len(piece)
        while begin < last:
            found.append(view[max(begin - at, 0) : end - at])
            if end > last:
                break
            begin, end = next(spans, (sys.maxsize, sys.maxsize))
        at = last
    return found


def state_of(name: ConversationId, created_at: int, metadata: bytes) -> bytes:
    """Returns OpenAI's object. `metadata` is JSON, and an id needs no escaping."""
    head = b'{"id":"%b","object":"conversation","created_at":%d' % (name.encode(), created_at)
    return b'%b,"metadata":%b}' % (head, metadata)


def not_found(conversation_id: str, param: str = "conversation_id") -> ApiError:
    return ApiError(404, f"Conversation with id {conversation_id!r} not found.", param=param)


def storage_full(error: StoreFull) -> ApiError:
    return ApiError(413, str(error), code="storage_full")
