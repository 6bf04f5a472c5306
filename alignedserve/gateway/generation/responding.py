"""Answers a call, from a client or a line of a batch job: makes its generation and sends what that yields."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, TypeVar

import msgspec
from fastapi import Request
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from alignedserve.batch.results import LineAnswer
from alignedserve.gateway.generation.call import (
    Call,
    CallContext,
    ChoiceDelta,
    ResponseBuilder,
    TokenUsage,
    unpacked,
)
from alignedserve.gateway.generation.endpoint import Endpoint, Endpoints
from alignedserve.gateway.generation.generation import Generation
from alignedserve.gateway.generation.preparer import Preparer
from alignedserve.gateway.generation.service import best_effort, served
from alignedserve.gateway.grammars.compiler import Compiler
from alignedserve.gateway.http.access import add_choices
from alignedserve.gateway.http.errors import ApiError, invalid, unavailable
from alignedserve.gateway.http.json_pieces import AnswerStream, Piece, blocks_of, json_response
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.islands.islands import Islands
from alignedserve.gateway.limits.fair_queue import QueueTimeout
from alignedserve.gateway.limits.limits import CallLimits, SloConfig
from alignedserve.gateway.model.lengths import AnswerLengths
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.telemetry.metrics import IgnoredParameters
from alignedserve.lengths.config import NONE, LengthConfig
from alignedserve.protocol.pooling import POOLINGS
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InvalidRequest

# ---- from a call to a generation and its response builder ------------------------------------------------------------


@dataclass(frozen=True)
class RequestBuilder:
    """Builds generations and their response builders. Raises ApiError and InvalidRequest."""

    model: ServedModel
    islands: Islands
    compiler: Compiler
    preparer: Preparer
    limits: CallLimits = field(default_factory=CallLimits)
    slo: SloConfig = field(default_factory=SloConfig)
    lengths: AnswerLengths = field(default_factory=lambda: AnswerLengths(LengthConfig(NONE)))
    # Gives a seed to requests that have none.
    seeds: Random = field(default_factory=Random)
    ignored_parameters: IgnoredParameters = field(default_factory=IgnoredParameters)
    # How embeddings are made: one of POOLINGS.
    embedding_pooling: str = POOLINGS[0]

    async def build(self, call: Call[Any]) -> tuple[Generation, ResponseBuilder]:
        """Returns a generation that is not started. The call has its service (service.py)."""
        assert call.service_tier
        request = call.request
        await self._compile(request.params, call.structure_name, request.owner)
        prompts = [await unpacked(packed) for packed in call.prompts]
        predictions = await self.lengths.predict(prompts, request.params, request.tier, request.owner)
        model = self.model.answering_as(request.adapter)
        generation = Generation(call, self.islands, model, prompts, predictions, self.seeds)
        answering = CallContext(model, str(call.service_tier), prompts, int(time.time()))
        return generation, call.spec.builder(answering)

    async def collect(self, call: Call[Any]) -> tuple[ResponseBuilder, TokenUsage]:
        """Runs the call to its end. Returns the builder with all deltas, and the usage."""
        generation, builder = await self.build(call)
        try:
            await generation.collect(builder.add)
        finally:
            generation.close()
        return builder, generation.usage

    async def _compile(self, params: SamplingParams, name: str, owner: str) -> None:
        """Compiles the schema or grammar, if there is one, which is the value of the parameter `name`. Raises ApiError
        with its error."""
        wanted = params.structured_outputs
        if wanted is None:
            return
        try:
            await self.compiler.check(wanted, self.limits.grammar_timeout_s, owner)
        except QueueTimeout:
            raise unavailable(f"{name}: schemas and grammars of other API keys are being compiled") from None
        except TimeoutError:
            message = f"{name}: not compiled within {self.limits.grammar_timeout_s:g} s"
            raise ApiError(400, message, param=name) from None
        except InvalidRequest as error:
            # The client knows the parameter by another name.
            raise ApiError(400, f"{name}: {str(error).partition(': ')[2]}", param=name) from error


# ---- to a line of a batch job ----------------------------------------------------------------------------------------


class LineAnswers:
    def __init__(self, request_builder: RequestBuilder, endpoints: Endpoints) -> None:
        self._request_builder = request_builder
        self._endpoints = endpoints

    async def ask(
        self, endpoint: str, body: bytes, expires_at: float, owner: str, is_pressed: bool = False
    ) -> LineAnswer:
        """Returns the answer to a line. `body` is a JSON object. The job belongs to `owner`, and expires at
        `expires_at`, in seconds since 1970."""
        try:
            return await self._answer(endpoint, body, expires_at, owner, is_pressed)
        except InvalidRequest as error:
            failure = invalid(error)
        except ApiError as error:
            failure = error
        return LineAnswer(failure.status, failure.body_for(endpoint))

    async def _answer(
        self, endpoint: str, body: bytes, expires_at: float, owner: str, is_pressed: bool
    ) -> LineAnswer:
        deadline_s = time.monotonic() + expires_at - time.time()
        preparer = self._request_builder.preparer
        call = await preparer.result(self._endpoints[endpoint], [body], owner, is_best_effort=True)
        assert isinstance(call, Call)
        if call.is_stream:
            raise InvalidRequest("stream=True: not possible in a batch")
        self._request_builder.ignored_parameters.note(call.ignored)
        call = best_effort(call, owner, deadline_s, is_pressed)
        pieces, usage = await call.spec.whole(call, self._request_builder)
        blocks = await blocks_of(pieces)
        return LineAnswer(200, msgspec.Raw(b"".join(blocks)), usage)


# ---- to a client, whole or as a stream -------------------------------------------------------------------------------

Result = TypeVar("Result")


# An answer is JSON or a stream of events.
ANSWERED: dict[int | str, Any] = {200: {"content": {"application/json": {}, "text/event-stream": {}}}}

# Called with a complete answer, before its end is sent.
Keep = Callable[[ResponseBuilder, TokenUsage], Awaitable[None]]


async def _keep_nothing(builder: ResponseBuilder, usage: TokenUsage) -> None:
    pass


async def read_call(http: Request, endpoint: Endpoint, request_builder: RequestBuilder) -> Call[Any]:
    """Reads the body and returns its call. Raises ApiError."""
    preparing = request_builder.preparer.call(endpoint, await json_body(http), owner_of(http))
    return await unless_gone(http, preparing)


async def answer_directly(http: Request, endpoint: Endpoint, request_builder: RequestBuilder) -> Response:
    """Reads the body and sends the answer of an endpoint that needs no engine. Raises ApiError."""
    preparing = request_builder.preparer.answer(endpoint, await json_body(http), owner_of(http))
    found = await unless_gone(http, preparing)
    headers = request_builder.ignored_parameters.note(found.ignored)
    return await json_response([found.body], headers)


async def respond(
    http: Request, call: Call[Any], request_builder: RequestBuilder, keep: Keep = _keep_nothing
) -> Response:
    """Runs the call and sends its answer. Raises ApiError and InvalidRequest."""
    call = served(call, http.headers, request_builder.slo, owner_of(http))
    headers = request_builder.ignored_parameters.note(call.ignored)
    add_choices(http, len(call.prompts) * call.request.params.n)
    if call.request.is_embedding:
        pieces, _ = await unless_gone(http, call.spec.whole(call, request_builder))
        return await json_response(pieces, headers)
    generation, builder = await unless_gone(http, request_builder.build(call))
    try:
        if call.is_stream:
            # The status is sent before the body, so every error that can be found before the first token is found
            # first.
            deltas = generation.deltas()
            first = await unless_gone(http, anext(deltas))
            events = _events(first, deltas, generation, builder, keep)
            return _EventStream(events, headers, generation.close)
        await unless_gone(http, generation.collect(builder.add))
        await keep(builder, generation.usage)
        return await json_response(builder.whole(generation.usage), headers)
    except BaseException:
        generation.close()
        raise


async def _events(
    first: ChoiceDelta | None,
    rest: AsyncIterator[ChoiceDelta],
    generation: Generation,
    builder: ResponseBuilder,
    keep: Keep,
) -> AsyncIterator[bytes | memoryview]:
    usage, delta = generation.usage, first
    try:
        while delta is not None:
            if delta.progress:
                yield builder.progress(delta, usage)
            else:
                if opening := builder.opening(delta, usage):
                    for block in await blocks_of(opening):
                        yield block
                for block in await _blocks(builder.events(delta, usage)):
                    yield block
            delta = await anext(rest, None)
        await keep(builder, usage)
        for block in await blocks_of(builder.end(usage)):
            yield block
    except ApiError as error:
        for block in await _blocks(builder.failure(error)):
            yield block


async def _blocks(events: bytes | Iterable[Piece]) -> Sequence[bytes | memoryview]:
    """Returns the events to send, without empty blocks."""
    blocks = [events] if isinstance(events, bytes) else await blocks_of(events)
    return [block for block in blocks if block]


class _EventStream(AnswerStream):
    def __init__(
        self, events: AsyncIterator[bytes | memoryview], headers: Mapping[str, str], close: Callable[[], None]
    ) -> None:
        headers = {"Cache-Control": "no-cache", **headers}
        super().__init__(events, media_type="text/event-stream", headers=headers)
        self._close = close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            # The client may have disconnected during the stream.
            self._close()


async def unless_gone(http: Request, work: Awaitable[Result]) -> Result:
    """Returns the result of `work`. Raises ApiError if the client disconnects first. `work` has ended then, too: what
    it frees at its end belongs to the body's share of memory, which is closed next."""
    working, watching = asyncio.ensure_future(work), asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            # No client reads this error; proxies log it as 499.
            raise ApiError(499, "the client has hung up")
        return working.result()
    finally:
        watching.cancel()
        if working.cancel():
            await asyncio.wait({working})


async def _gone(http: Request) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass
