"""Answers background responses. A gateway leases those that no gateway works on. If the gateway dies, another one
starts them again."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from alignedserve.batch.config import BatchConfig
from alignedserve.gateway.generation.call import Call, CallContext
from alignedserve.gateway.generation.endpoint import Endpoint, Needed
from alignedserve.gateway.generation.responding import RequestBuilder
from alignedserve.gateway.generation.service import served
from alignedserve.gateway.http.errors import ApiError, invalid
from alignedserve.gateway.http.json_pieces import Json, encode
from alignedserve.gateway.http.reading import BodyMemory
from alignedserve.gateway.openai.responses.builder import ResponsesBuilder, ResponseSpec
from alignedserve.gateway.openai.responses.kept import (
    EarlierConversation,
    KeptResponses,
    head_of,
    output_parts,
    parts_of,
)
from alignedserve.gateway.openai.responses.output import Output
from alignedserve.store import (
    ConversationFull,
    Delivery,
    Lease,
    Part,
    ResponseGone,
    ResponseHead,
    ResponseId,
    ResponseStore,
    StoreFull,
)
from alignedserve.store.leased_work import LeasedWork
from alignedserve.store.polling import StorePoller
from alignedserve.store.responses import Pieces, ResponseStatus, sizes_of
from alignedserve.store.retry import retried
from alignedserve.types import InvalidRequest

# Responses that a gateway works on at a time, and those of one owner. Without the latter, one owner could hold all
# places for as long as its responses take.
MAX_AT_A_TIME = 128
MAX_OF_OWNER = 64
# Statuses after which a call is retried without limit.
_NOT_NOW = (429, 503)


class BackgroundResponses:
    def __init__(
        self,
        store: ResponseStore,
        request_builder: RequestBuilder,
        endpoint: Endpoint,
        name: str,
        memory: BodyMemory,
        config: BatchConfig | None = None,
        deliveries_of: Callable[[ResponseHead], Sequence[Delivery]] = lambda head: (),
    ) -> None:
        """`name` is this process's name as a holder of leases. Calls that are read have shares in `memory`.
        `deliveries_of` returns the webhook deliveries for the end of a response."""
        self._store = store
        self._request_builder = request_builder
        self._endpoint = endpoint
        self._name = name
        self._deliveries_of = deliveries_of
        self._config = config or BatchConfig()
        self._memory = memory
        self._kept = KeptResponses(store, request_builder.limits.max_body_bytes)
        self._leased = LeasedWork(store.release, lambda _: self._poller.wake(), "response")
        self._is_leaving = False
        self._poller = StorePoller(self._look, self._config.look_s, "responses")

    # ---- called by routes ----

    async def begin(
        self, call: Call[ResponseSpec], body: Sequence[bytes], owner: str, before: EarlierConversation
    ) -> ResponseHead:
        """Stores the call, which is answered later, and returns the response as it is now. Raises ApiError, StoreFull
        and TooManyJobs."""
        state = self._builder(call, owner, int(time.time())).state("queued")
        parts: dict[Part, Pieces] = {**parts_of(call.spec), "call": body}
        head = head_of(call.spec, owner, before, state, parts)
        await self._store.add(head, parts)
        self._poller.wake()
        return head

    async def cancel(self, head: ResponseHead) -> ResponseHead:
        """Cancels the response and returns it. If it has ended, returns it unchanged."""
        while not head.is_over:
            changed = _changed(head, "cancelled", status="cancelled")
            if await self._store.replace(head, changed, None, self._deliveries_of(changed)):
                self._stop(head.id)
                return changed
            head = await self._store.head(head.id) or changed
        return head

    # ---- the work ----

    def stop(self) -> None:
        """Stops. Running responses are started again after the next start, or by another gateway."""
        self._poller.stop()

    async def leave(self) -> None:
        """Leases no more responses: other gateways do. Returns when the leased ones are answered."""
        self._is_leaving = True
        while tasks := self._leased.tasks:
            await asyncio.wait(tasks.values())

    async def run(self) -> None:
        """Runs until it is stopped."""
        try:
            await self._poller.run()
        finally:
            await self._leased.cancel()

    async def _look(self) -> None:
        await self._leased.renew(self._store.renew, self._config.lease_s)
        free = MAX_AT_A_TIME - len(self._leased.tasks)
        if free and not self._is_leaving:
            for lease in await self._store.take(self._name, self._config.lease_s, free, MAX_OF_OWNER):
                self._leased.begin(lease, self._work)
        for head in await self._store.expired(time.time()):
            await self._store.delete(head)
        await self._store.conversations.drop_expired(time.time())

    def _stop(self, response_id: ResponseId) -> None:
        for lease, task in self._leased.tasks.items():
            if lease.id == response_id:
                task.cancel()

    async def _work(self, lease: Lease) -> None:
        head = await retried(self._store.head, ResponseId(lease.id))
        if head is None or head.is_over:
            return
        num_falls = await retried(self._store.begin, lease)
        if num_falls >= self._config.max_num_falls:
            error = ApiError(500, f"the gateway died {num_falls} times while it was being answered")
            await self._fail(head, error, lease)
            return
        head = await self._begun(head, lease)
        if head is not None:
            with contextlib.suppress(ResponseGone):
                await self._answer(head, lease)

    async def _begun(self, head: ResponseHead, lease: Lease) -> ResponseHead | None:
        """Sets the response in progress. Returns None if it was changed meanwhile."""
        changed = _changed(head, head.status, status="in_progress")
        return changed if await retried(self._store.replace, head, changed, lease) else None

    async def _answer(self, head: ResponseHead, lease: Lease) -> None:
        pause_s, num_failed = self._config.retry_s, 0
        while True:
            try:
                state, output = await self._answered(head)
                await self._end(head, state, lease, output)
                return
            except StoreFull as full:
                await self._fail(head, ApiError(413, str(full), code="storage_full"), lease)
                return
            except (ApiError, InvalidRequest) as found:
                error = invalid(found) if isinstance(found, InvalidRequest) else found
            num_failed += error.status >= 500 and error.status not in _NOT_NOW
            is_for_good = error.status < 500 and error.status not in _NOT_NOW
            if is_for_good or num_failed == self._config.max_num_tries:
                await self._fail(head, error, lease)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.max_retry_s)

    async def _answered(self, head: ResponseHead) -> tuple[Json, Output]:
        """Runs the call. Returns the final state and the output. Raises ApiError, InvalidRequest and ResponseGone."""
        request_builder = self._request_builder
        call = await retried(self._prepared, head)
        call = served(call, {}, request_builder.slo, head.owner)
        builder, usage = await request_builder.collect(call)
        assert isinstance(builder, ResponsesBuilder)
        state = builder.finished(usage)
        return state | {"created_at": head.created_at}, builder.output

    async def _prepared(self, head: ResponseHead) -> Call[ResponseSpec]:
        """Returns the call without the parts that are stored already."""
        with self._memory.share(head.owner) as share:
            share.add(head.size_of("call"))
            body = [piece async for piece in self._kept.pieces(head, "call")]
            preparer, before = self._request_builder.preparer, EarlierConversation()
            if needed := _needed(head):
                before = await self._kept.before(needed, head.owner, share, head.size_of("call"))
            call, _ = await self._kept.prepared(preparer, self._endpoint, body, head.owner, share, before)
        assert isinstance(call, Call)
        replace = msgspec.structs.replace
        spec = replace(call.spec, response_id=head.id, repeated=b"{}", input_items=b"", item_index=b"")
        return replace(call, spec=spec)

    async def _end(self, head: ResponseHead, state: Json, lease: Lease, output: Output | None = None) -> None:
        """Stores the final state and the output. Raises ApiError if the conversation has no room for the output."""
        parts = output_parts(output) if output else {}
        changed = msgspec.structs.replace(
            head,
            status=state["status"],
            state=encode(state),
            num_bytes={**head.num_bytes, **sizes_of(parts), "call": 0},
            num_logprob_bytes=output.num_logprob_bytes if output else 0,
        )
        turn = None
        if head.conversation_id is not None and output and changed.status in ("completed", "incomplete"):
            turn = self._kept.conversations.turn_of(head.conversation_id, output)
        # If the response was changed, it was cancelled or deleted meanwhile.
        deliveries = self._deliveries_of(changed)
        try:
            await retried(self._store.replace, head, changed, lease, deliveries, parts, turn)
        except ConversationFull:
            raise self._kept.conversations.full() from None

    async def _fail(self, head: ResponseHead, error: ApiError, lease: Lease) -> None:
        found = {"code": error.code or "server_error", "message": error.message}
        state = msgspec.json.decode(head.state) | {"status": "failed", "error": found}
        await self._end(head, state, lease)

    def _builder(self, call: Call[ResponseSpec], owner: str, created: int) -> ResponsesBuilder:
        call = served(call, {}, self._request_builder.slo, owner)
        model = self._request_builder.model.answering_as(call.request.adapter)
        return call.spec.builder(CallContext(model, str(call.service_tier), [], created))


def _needed(head: ResponseHead) -> Needed | None:
    """Returns what the response continues. None: nothing."""
    if head.conversation_id is not None:
        return Needed("conversation", head.conversation_id)
    return None if head.previous_id is None else Needed("previous_response_id", head.previous_id)


def _changed(head: ResponseHead, status: ResponseStatus, /, **state: Any) -> ResponseHead:
    """Returns the response with this status and these changes of its state, which is small."""
    fields = msgspec.json.decode(head.state) | state
    return msgspec.structs.replace(head, status=status, state=encode(fields))
