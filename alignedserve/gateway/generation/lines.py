"""Answers a line of a batch job as its endpoint would, but as best effort and never as a stream."""

from __future__ import annotations

import time

import msgspec

from alignedserve.batch.results import Answer as LineAnswer
from alignedserve.gateway.generation.endpoint import Endpoints
from alignedserve.gateway.generation.prepared import Prepared, PreparedCall
from alignedserve.gateway.generation.request_builder import RequestBuilder
from alignedserve.gateway.generation.service import Service
from alignedserve.gateway.http.errors import ApiError, invalid
from alignedserve.gateway.http.json_pieces import blocks_of
from alignedserve.types import InvalidRequest


class LineAnswers:
    def __init__(self, request_builder: RequestBuilder, endpoints: Endpoints) -> None:
        self._request_builder = request_builder
        self._endpoints = endpoints

    async def ask(
        self, endpoint: str, body: bytes, expires_at: float, owner: str, is_pressed: bool = False
    ) -> LineAnswer:
        """Returns the answer to a line. `body` is a JSON object. The job belongs to `owner`, and expires at
        `expires_at`, in seconds since 1970."""
        deadline_s = time.monotonic() + expires_at - time.time()
        service = Service("flex", "be", deadline_s=deadline_s, is_pressed=is_pressed)
        try:
            return await self._answer(endpoint, body, service, owner)
        except InvalidRequest as error:
            failure = invalid(error)
        except ApiError as error:
            failure = error
        return LineAnswer(failure.status, failure.body_for(endpoint))

    async def _answer(self, endpoint: str, body: bytes, service: Service, owner: str) -> LineAnswer:
        preparer = self._request_builder.preparer
        call = await preparer.result(self._endpoints[endpoint], [body], owner, is_best_effort=True)
        assert isinstance(call, PreparedCall)
        if isinstance(call, Prepared) and call.is_stream:
            raise InvalidRequest("stream=True: not possible in a batch")
        self._request_builder.ignored_parameters.note(call.ignored)
        pieces, usage = await call.whole(self._request_builder, service, owner)
        blocks = await blocks_of(pieces)
        return LineAnswer(200, msgspec.Raw(b"".join(blocks)), usage)
