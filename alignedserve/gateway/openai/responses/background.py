"""Responses in the background: a gateway takes those that nobody works on, and answers them. What dies with a gateway
another one begins again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence

import msgspec

from alignedserve.batch.config import BatchConfig
from alignedserve.gateway.generation.endpoint import Endpoint
from alignedserve.gateway.generation.prepared import Answering
from alignedserve.gateway.generation.request_builder import RequestBuilder
from alignedserve.gateway.generation.service import Slo, service_of
from alignedserve.gateway.http.errors import ApiError, invalid
from alignedserve.gateway.http.json_pieces import Json, encode
from alignedserve.gateway.openai.responses.builder import ResponsesBuilder
from alignedserve.gateway.openai.responses.kept import record_of
from alignedserve.gateway.openai.responses.prepare import PreparedResponse
from alignedserve.store import (
    Delivery,
    Lease,
    LeaseLost,
    ResponseId,
    ResponseRecord,
    ResponseStore,
    StoreAway,
)
from alignedserve.store.looking import Looking
from alignedserve.store.retry import retried
from alignedserve.types import InvalidRequest

log = logging.getLogger(__name__)

# The most responses that a gateway works on at a time.
MAX_AT_A_TIME = 64
# A call that was refused for one of these is tried again, as often as needed.
_NOT_NOW = (429, 503)


class BackgroundResponses:
    def __init__(
        self,
        store: ResponseStore,
        request_builder: RequestBuilder,
        endpoint: Endpoint,
        name: str,
        config: BatchConfig | None = None,
        deliveries_of: Callable[[ResponseRecord], Sequence[Delivery]] = lambda record: (),
    ) -> None:
        """`name` is the gateway's, for people to read; `deliveries_of` tell of the end of a response."""
        self._store = store
        self._request_builder = request_builder
        self._endpoint = endpoint
        self._name = name
        self._deliveries_of = deliveries_of
        self._config = config or BatchConfig()
        self._held: dict[Lease, asyncio.Task[None]] = {}
        self._is_leaving = False
        self._looking = Looking(self._look, self._config.look_s, "responses")

    # ---- what routes call ----

    async def begin(self, call: PreparedResponse, body: bytes, owner: str) -> Json:
        """Stores the call, which is answered later, and returns the response as it is now. Raises ApiError, StoreFull
        and TooManyJobs."""
        builder = self._builder(call, int(time.time()))
        found = builder.body("queued")
        await self._store.add(record_of(call, owner, "queued", builder.id, encode(found), body))
        self._looking.wake()
        return found

    async def cancel(self, record: ResponseRecord) -> ResponseRecord:
        """Returns the response after the cancellation; as it is, if it is over."""
        while not record.is_over:
            body = msgspec.json.decode(record.body) | {"status": "cancelled"}
            changed = msgspec.structs.replace(record, status="cancelled", body=encode(body), call=b"")
            if await self._store.replace(record, changed, None, self._deliveries_of(changed)):
                self._stop(record.id)
                return changed
            record = await self._store.get(record.id) or changed
        return record

    # ---- the work ----

    def stop(self) -> None:
        """What runs is begun again after the next start, or by another gateway."""
        self._looking.stop()

    async def leave(self) -> None:
        """Takes no more calls: other gateways do. Returns when those that it has are answered."""
        self._is_leaving = True
        while self._held:
            await asyncio.wait(self._held.values())

    async def run(self) -> None:
        """Runs until it is stopped."""
        try:
            await self._looking.run()
        finally:
            for task in self._held.values():
                task.cancel()
            await asyncio.gather(*self._held.values(), return_exceptions=True)

    async def _look(self) -> None:
        await self._renew()
        free = MAX_AT_A_TIME - len(self._held)
        if free and not self._is_leaving:
            for lease in await self._store.take(self._name, self._config.lease_s, free):
                task = self._held[lease] = asyncio.create_task(self._work(lease))
                task.add_done_callback(lambda _, lease=lease: self._over(lease))  # type: ignore[misc]
        for record in await self._store.expired(time.time()):
            await self._store.delete(record)

    async def _renew(self) -> None:
        leases = list(self._held)
        for lease, state in zip(leases, await self._store.renew(leases, self._config.lease_s), strict=True):
            if state != "held" and lease in self._held:
                self._held[lease].cancel()

    def _stop(self, response_id: ResponseId) -> None:
        for lease, task in self._held.items():
            if ResponseId(lease.job_id) == response_id:
                task.cancel()

    def _over(self, lease: Lease) -> None:
        del self._held[lease]
        self._looking.wake()

    async def _work(self, lease: Lease) -> None:
        try:
            record = await retried(self._store.get, ResponseId(lease.job_id))
            if record is None or record.is_over:
                return
            num_falls = await retried(self._store.begin, lease)
            if num_falls >= self._config.max_num_falls:
                error = ApiError(500, f"the gateway died {num_falls} times while it was being answered")
                await self._fail(record, error, lease)
                return
            record = await self._begun(record, lease)
            if record is not None:
                await self._answer(record, lease)
        except LeaseLost:
            return
        except asyncio.CancelledError:
            await self._let_go(lease)
            raise
        except Exception:
            # It is not released but its lease lapses, so that it is not tried again at once.
            log.exception("a response failed, and is tried again")

    async def _begun(self, record: ResponseRecord, lease: Lease) -> ResponseRecord | None:
        """Says that the response is in progress. Returns None if it has changed meanwhile."""
        body = encode(msgspec.json.decode(record.body) | {"status": "in_progress"})
        changed = msgspec.structs.replace(record, body=body)
        return changed if await retried(self._store.replace, record, changed, lease) else None

    async def _answer(self, record: ResponseRecord, lease: Lease) -> None:
        pause_s, num_failed = self._config.retry_s, 0
        while True:
            try:
                body = await self._answered(record)
                await self._end(record, body, lease)
                return
            except (ApiError, InvalidRequest) as found:
                error = invalid(found) if isinstance(found, InvalidRequest) else found
            num_failed += error.status >= 500 and error.status not in _NOT_NOW
            is_for_good = error.status < 500 and error.status not in _NOT_NOW
            if is_for_good or num_failed == self._config.max_num_tries:
                await self._fail(record, error, lease)
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._config.max_retry_s)

    async def _answered(self, record: ResponseRecord) -> Json:
        """Raises ApiError and InvalidRequest."""
        request_builder = self._request_builder
        call = await request_builder.preparer.call(self._endpoint, [record.call], record.owner)
        slo = Slo(ttft_ms=call.ttft_ms, tbt_ms=call.tbt_ms)
        service = service_of(call.service_tier, slo, {}, request_builder.slo)
        generation, builder = await request_builder.build(call, service, record.owner)
        assert isinstance(builder, ResponsesBuilder)
        try:
            await generation.collect(builder.add)
        finally:
            generation.close()
        return builder.finished(generation.usage) | {"id": record.id, "created_at": record.created_at}

    async def _end(self, record: ResponseRecord, body: Json, lease: Lease) -> None:
        changed = msgspec.structs.replace(record, status=body["status"], body=encode(body), call=b"")
        # If it has changed it was cancelled or deleted meanwhile.
        await retried(self._store.replace, record, changed, lease, self._deliveries_of(changed))

    async def _fail(self, record: ResponseRecord, error: ApiError, lease: Lease) -> None:
        body = msgspec.json.decode(record.body)
        body |= {
            "status": "failed",
            "error": {"code": error.code or "server_error", "message": error.message},
        }
        await self._end(record, body, lease)

    async def _let_go(self, lease: Lease) -> None:
        with contextlib.suppress(StoreAway):
            await self._store.release(lease)

    def _builder(self, call: PreparedResponse, created: int) -> ResponsesBuilder:
        request_builder = self._request_builder
        slo = Slo(ttft_ms=call.ttft_ms, tbt_ms=call.tbt_ms)
        service = service_of(call.service_tier, slo, {}, request_builder.slo)
        model = request_builder.model.answering_as(call.adapter)
        return call.response_builder(Answering(model, service, [], created))
