"""Responses that are kept: the conversation before a response, and what is stored of one that has ended."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import msgspec

from alignedserve.gateway.generation.generation import Usage
from alignedserve.gateway.generation.response_builder import ResponseBuilder
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import encode
from alignedserve.gateway.openai.responses.builder import ResponsesBuilder
from alignedserve.gateway.openai.responses.items import Item
from alignedserve.gateway.openai.responses.prepare import PreparedResponse
from alignedserve.store import ResponseId, ResponseRecord, ResponseStore, StoreAway, StoreFull

log = logging.getLogger(__name__)

# OpenAI keeps them as long.
KEPT_S = 30 * 86400
# The most responses that a conversation may have, each of which is read for its next turn.
MAX_TURNS = 512
_PREVIOUS = b'"previous_response_id"'


class _Named(msgspec.Struct):
    previous_response_id: str | None = None


class _Answered(msgspec.Struct):
    output: list[Item] = []


class KeptResponses:
    def __init__(self, store: ResponseStore | None) -> None:
        self._store = store

    async def with_earlier(self, pieces: Sequence[bytes], owner: str) -> list[bytes]:
        """Returns the body of a call with the items of the conversation that it goes on with. Raises ApiError."""
        data = b"".join(pieces)
        if _PREVIOUS not in data or not data.lstrip().startswith(b"{"):
            return list(pieces)
        try:
            previous = msgspec.json.decode(data, type=_Named).previous_response_id
        except msgspec.MsgspecError:
            # What is wrong is found where the body is read.
            return list(pieces)
        if previous is None:
            return list(pieces)
        items = await self._items_up_to(ResponseId(previous), owner)
        return [b'{"earlier_items":', encode(items), b",", data.lstrip()[1:]]

    async def keep(self, call: PreparedResponse, owner: str, builder: ResponseBuilder, usage: Usage) -> None:
        """Stores the response, which has ended. If that is not possible, the response says that it is not stored."""
        assert isinstance(builder, ResponsesBuilder)
        if self._store is None or not call.is_stored:
            builder.repeated["store"] = False
            return
        body = builder.finished(usage)
        try:
            await self._store.add(record_of(call, owner, body["status"], body["id"], encode(body)))
        except (StoreFull, StoreAway) as error:
            builder.repeated["store"] = False
            log.warning(
                "a response is not kept: %s", "there is no room" if isinstance(error, StoreFull) else error
            )

    async def find(self, response_id: str, owner: str) -> ResponseRecord:
        """Raises ApiError, which is the same for a response that does not exist and for another owner's."""
        record = await self._store.get(ResponseId(response_id)) if self._store else None
        if record is None or record.owner != owner:
            raise ApiError(404, f"Response with id {response_id!r} not found.", param="response_id")
        return record

    async def _items_up_to(self, response_id: ResponseId, owner: str) -> list[Item]:
        """Returns the items of the conversation up to this response, its output included. Raises ApiError."""
        turns: list[list[Item]] = []
        at: ResponseId | None = response_id
        while at is not None:
            record = await self._store.get(at) if self._store else None
            if record is None or record.owner != owner or not record.is_over:
                message = f"Previous response with id {at!r} not found, or not complete."
                raise ApiError(400, message, param="previous_response_id", code="previous_response_not_found")
            output = msgspec.json.decode(record.body, type=_Answered).output
            turns.append([*msgspec.json.decode(record.input_items), *output])
            at = record.previous_id
            if len(turns) > MAX_TURNS:
                message = f"a conversation of more than {MAX_TURNS} responses"
                raise ApiError(400, f"previous_response_id: {message}", param="previous_response_id")
        return [item for turn in reversed(turns) for item in turn]


def record_of(
    call: PreparedResponse, owner: str, status: str, response_id: str, body: bytes, pending: bytes = b""
) -> ResponseRecord:
    """`pending` is the body of a call that is not answered yet."""
    now = int(time.time())
    previous = call.previous_response_id
    return ResponseRecord(
        id=ResponseId(response_id),
        owner=owner,
        status=status,  # type: ignore[arg-type]
        created_at=now,
        expires_at=now + KEPT_S,
        previous_id=None if previous is None else ResponseId(previous),
        input_items=call.input_items,
        body=body,
        call=pending,
    )
