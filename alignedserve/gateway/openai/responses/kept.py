"""Stored responses: the conversation before a response, and the stored parts of one that has ended.

Stored parts can be large, so they are only moved here, in pieces, and never decoded.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from alignedserve.gateway.generation.call import ResponseBuilder, TokenUsage
from alignedserve.gateway.generation.endpoint import ConversationNeeded, Endpoint, Needed, Result
from alignedserve.gateway.generation.preparer import Preparer
from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.http.json_pieces import Json, Piece, encode
from alignedserve.gateway.http.reading import Share, too_large
from alignedserve.gateway.openai.responses.body import MAX_RESPONSE_ID_CHARS
from alignedserve.gateway.openai.responses.builder import ResponsesBuilder, ResponseSpec
from alignedserve.gateway.openai.responses.conversations import (
    KeptConversations,
    said_pieces,
    storage_full,
)
from alignedserve.gateway.openai.responses.output import Output, spans_without_logprobs
from alignedserve.gateway.openai.responses.references import MAX_TURNS, stored_items
from alignedserve.store import (
    ConversationFull,
    ConversationId,
    NewItems,
    Part,
    ResponseGone,
    ResponseHead,
    ResponseId,
    ResponseStore,
    StoreAway,
    StoreFull,
)
from alignedserve.store.records import Order
from alignedserve.store.responses import ItemPage, Pieces, sizes_of
from alignedserve.store.retry import repeated

log = logging.getLogger(__name__)

# Seconds that a response is stored: as long as at OpenAI.
KEPT_S = 30 * 86400
# Ids that responses can have here.
_ID = re.compile(rf"[a-zA-Z0-9_-]{{1,{MAX_RESPONSE_ID_CHARS}}}")


# The parts that a turn adds to a conversation.
_TURN: tuple[Part, ...] = ("input_items", "output")


@dataclass(frozen=True)
class EarlierConversation:
    """What precedes a call."""

    # Items as a JSON array, in pieces. None: there are none.
    items: list[Piece] | None = None
    num_bytes: int = 0
    # The number of responses in it.
    num_turns: int = 0
    # The stored items that references name, in the same form. None: they were not looked up.
    referred: list[Piece] | None = None
    num_referred_bytes: int = 0

    @property
    def pieces(self) -> list[Piece] | None:
        """A JSON object of both, in pieces. None: there is neither."""
        given = {b'"items":': self.items, b'"referred":': self.referred}
        members = [piece for name, some in given.items() if some is not None for piece in (b",", name, *some)]
        return [b"{", *members[1:], b"}"] if members else None


class KeptResponses:
    def __init__(self, store: ResponseStore | None, max_body_bytes: int) -> None:
        """`max_body_bytes` is the largest size of a body together with the conversation before it."""
        self._store = store
        self._max_body_bytes = max_body_bytes
        self.conversations = KeptConversations(store.conversations if store else None, max_body_bytes)

    async def keep(
        self,
        spec: ResponseSpec,
        owner: str,
        before: EarlierConversation,
        builder: ResponseBuilder,
        usage: TokenUsage,
    ) -> None:
        """Stores a response that has ended, and adds it to its conversation. If it can't be stored, its `store` becomes
        false. Raises ApiError if it has a conversation, because the next turn would otherwise lack this one."""
        assert isinstance(builder, ResponsesBuilder)
        output, name = builder.output, spec.conversation_id
        if self._store is None or not spec.is_stored:
            builder.is_stored = False
            if name is not None:
                await self._append(spec, owner, name, builder)
            return
        parts = parts_of(spec) | output_parts(output)
        head = head_of(spec, owner, before, builder.finished(usage), parts, output.num_logprob_bytes)
        turn = None if name is None else self.conversations.turn_of(name, output)
        try:
            if turn is None:
                await self._store.add(head, parts)
            else:
                await repeated(self._store.add, head, parts, turn)
        except ConversationFull:
            raise self.conversations.full() from None
        except StoreFull as error:
            if turn is not None:
                raise storage_full(error) from None
            self._is_not_kept(builder, "the store is full")
        except StoreAway as error:
            if turn is not None:
                raise _no_turn(error) from None
            self._is_not_kept(builder, str(error))

    @staticmethod
    def _is_not_kept(builder: ResponsesBuilder, reason: str) -> None:
        builder.is_stored = False
        log.warning("a response is not stored: %s", reason)

    async def prepared(
        self,
        preparer: Preparer,
        endpoint: Endpoint,
        body: Sequence[bytes],
        owner: str,
        share: Share,
        before: EarlierConversation,
    ) -> tuple[Result, EarlierConversation]:
        """Returns the result of the endpoint for a body, and what precedes it: `before`, or what it needs besides.
        Raises ApiError."""
        while True:
            try:
                return await preparer.result(endpoint, body, owner, before.pieces), before
            except ConversationNeeded as found:
                before = await self.before(found.needed, owner, share, sum(map(len, body)), before)

    async def before(
        self,
        needed: Needed,
        owner: str,
        share: Share,
        num_body_bytes: int,
        known: EarlierConversation = EarlierConversation(),
    ) -> EarlierConversation:
        """Returns what precedes a call with a body of `num_body_bytes`, with what is `known` of that. Its size is added
        to `share` before it is read. Raises ApiError."""
        if needed.param == "input":
            return await self._with_referred(known, needed.item_ids, owner, share, num_body_bytes)
        if needed.param == "previous_response_id":
            return await self.conversation(needed.id, owner, share, num_body_bytes)
        return EarlierConversation(*await self.conversations.items(needed.id, owner, share, num_body_bytes))

    async def find(self, response_id: str, owner: str) -> ResponseHead:
        """Returns the response. Raises the same ApiError for one that does not exist and for another owner's."""
        head = await self._head(response_id)
        if head is None or head.owner != owner:
            raise not_found(response_id)
        return head

    async def conversation(
        self, response_id: str, owner: str, share: Share, num_body_bytes: int
    ) -> EarlierConversation:
        """Returns the conversation up to the end of this response, for a call with a body of `num_body_bytes`. Its size
        is added to `share` before it is read. Raises ApiError."""
        heads = await self._heads_up_to(response_id, owner, num_body_bytes)
        num_bytes = heads[0].num_conversation_bytes
        share.add(num_bytes)
        pieces: list[Piece] = []
        try:
            for head in reversed(heads):
                for part in _TURN:
                    if head.size_of(part):
                        pieces.append(b"," if pieces else b"[")
                    for begin, end in await self._spans(head, part):
                        pieces += [piece async for piece in self.pieces(head, part, begin, end)]
        except BaseException as error:
            # The call may ask again.
            share.add(-num_bytes)
            if isinstance(error, ResponseGone):
                raise _no_previous(str(error)) from None
            raise
        return EarlierConversation([*(pieces or [b"["]), b"]"], num_bytes, heads[0].num_turns)

    def pieces(
        self, head: ResponseHead, part: Part, begin: int = 0, end: int | None = None
    ) -> AsyncIterator[bytes]:
        """Yields the bytes of a part. Raises ResponseGone and StoreAway."""
        assert self._store
        return self._store.pieces(head, part, begin, end)

    async def read(self, head: ResponseHead, part: Part, begin: int, end: int) -> bytes:
        """Returns the bytes of a part between two places. Raises ResponseGone and StoreAway."""
        return b"".join([piece async for piece in self.pieces(head, part, begin, end)])

    async def response(self, head: ResponseHead) -> AsyncIterator[bytes]:
        """Yields OpenAI's object. Raises ResponseGone and StoreAway."""
        yield head.state[:-1] + b',"output":['
        async for piece in self.pieces(head, "output"):
            yield piece
        yield b"],"
        async for piece in self.pieces(head, "repeated", 1):
            yield piece

    @staticmethod
    def num_bytes(head: ResponseHead) -> int:
        """Returns the size of OpenAI's object."""
        return len(head.state) + len(b',"output":[') + head.size_of("output") + head.size_of("repeated")

    async def item_page(
        self, head: ResponseHead, after: str | None, limit: int, order: Order
    ) -> ItemPage | None:
        """Returns a page of the input's items. None: there is no item `after`."""
        assert self._store
        try:
            name = None if after is None else encode(after)
        except UnicodeEncodeError:
            return None
        return await self._store.item_page(head.id, name, limit, order)

    async def _append(self, spec: ResponseSpec, owner: str, name: str, builder: ResponsesBuilder) -> None:
        """Adds a response that is not stored to its conversation, unless that was deleted. Raises ApiError."""
        said = NewItems(said_pieces(builder.output), builder.output.index())
        new = [NewItems([spec.input_items], spec.item_index), said]
        try:
            await self.conversations.append_turn(name, owner, new, builder.id)
        except StoreAway as error:
            raise _no_turn(error) from None

    async def _spans(self, head: ResponseHead, part: Part) -> list[tuple[int, int]]:
        """Returns the spans of a part that belong to the conversation: all but log-probabilities."""
        num_bytes = head.size_of(part)
        if part == "output" and head.num_logprob_bytes:
            places = await self.read(head, "places", 0, head.size_of("places"))
            return [*spans_without_logprobs(places, num_bytes)]
        return [(0, num_bytes)]

    async def _head(self, response_id: str) -> ResponseHead | None:
        if self._store is None or not _ID.fullmatch(response_id):
            return None
        return await self._store.head(ResponseId(response_id))

    async def _heads_up_to(self, response_id: str, owner: str, num_body_bytes: int) -> Sequence[ResponseHead]:
        """Returns the responses of the conversation, the last one first. Raises ApiError."""
        heads: list[ResponseHead] = []
        at: str | None = response_id
        while at is not None:
            head = await self._head(at)
            if head is None or head.owner != owner or not head.is_over:
                raise _no_previous(at)
            if head.conversation_id is not None:
                message = "previous_response_id: it belongs to a conversation; use conversation"
                raise ApiError(400, message, param="previous_response_id")
            if not heads:
                self._check_size(head, num_body_bytes)
            heads.append(head)
            at = head.previous_id
        return heads

    async def _with_referred(
        self, known: EarlierConversation, names: Sequence[str], owner: str, share: Share, num_body_bytes: int
    ) -> EarlierConversation:
        """Adds the stored items with these ids. Raises ApiError."""
        num_bytes = 0

        def admit(num_more: int) -> None:
            nonlocal num_bytes
            num_bytes += num_more
            if num_bytes + known.num_bytes + num_body_bytes > self._max_body_bytes:
                raise too_large(self._max_body_bytes, "with all that it refers to, ")
            share.add(num_more)

        items = await stored_items(self._store, names, owner, admit)
        pieces = [piece for item in items for piece in (b",", *item)]
        return replace(known, referred=[b"[", *pieces[1:], b"]"], num_referred_bytes=num_bytes)

    def _check_size(self, head: ResponseHead, num_body_bytes: int) -> None:
        if head.num_turns >= MAX_TURNS:
            message = f"previous_response_id: a conversation of more than {MAX_TURNS} responses"
            raise ApiError(400, message, param="previous_response_id")
        if head.num_conversation_bytes + num_body_bytes > self._max_body_bytes:
            raise too_large(self._max_body_bytes, "with the conversation before it, ")


def not_found(response_id: str) -> ApiError:
    return ApiError(404, f"Response with id {response_id!r} not found.", param="response_id")


def _no_turn(error: StoreAway) -> ApiError:
    log.warning("a turn is not added to its conversation: %s", error)
    # The reason is only for the operator.
    return unavailable("conversation: the store can't be reached now")


def _no_previous(response_id: str) -> ApiError:
    message = f"Previous response with id {response_id!r} not found, or not complete."
    return ApiError(400, message, param="previous_response_id", code="previous_response_not_found")


def parts_of(spec: ResponseSpec) -> dict[Part, Pieces]:
    """Returns the stored parts of a call, which do not depend on its answer."""
    return {
        "input_items": [spec.input_items],
        "item_index": [spec.item_index],
        "repeated": [spec.repeated],
    }


def output_parts(output: Output) -> dict[Part, Pieces]:
    return {"output": output.items, "places": [output.places]}


def head_of(
    spec: ResponseSpec,
    owner: str,
    before: EarlierConversation,
    state: Json,
    parts: dict[Part, Pieces],
    num_logprob_bytes: int = 0,
) -> ResponseHead:
    now = int(time.time())
    previous, conversation = spec.previous_response_id, spec.conversation_id
    return ResponseHead(
        id=ResponseId(state["id"]),
        owner=owner,
        status=state["status"],
        created_at=now,
        expires_at=now + KEPT_S,
        previous_id=None if previous is None else ResponseId(previous),
        conversation_id=None if conversation is None else ConversationId(conversation),
        is_background=spec.is_background,
        num_turns=before.num_turns + 1,
        num_earlier_bytes=before.num_bytes,
        num_bytes=sizes_of(parts),
        num_logprob_bytes=num_logprob_bytes,
        state=encode(state),
    )
