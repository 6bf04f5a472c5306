"""Routes that change the server for all its clients, in the form of vLLM: adapters are loaded and unloaded, and the
prefix cache is reset."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping
from typing import Annotated, Final

from fastapi import APIRouter, Request
from fastapi.responses import PlainTextResponse, Response
from pydantic import BaseModel, Field

from alignedserve.gateway.generation.endpoint import DirectAnswer, Endpoint
from alignedserve.gateway.generation.responding import RequestBuilder
from alignedserve.gateway.http.access import require_operator
from alignedserve.gateway.http.description import request_body
from alignedserve.gateway.http.errors import ApiError, unavailable
from alignedserve.gateway.http.keys import owner_of
from alignedserve.gateway.http.reading import json_body
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.protocol.messages import AdaptersChanged, ChangeAdapters

# Seconds within which all instances should have loaded an adapter.
LOAD_S = 120.0

Name = Annotated[str, Field(min_length=1, max_length=128)]


class LoadBody(BaseModel):
    lora_name: Name
    lora_path: Annotated[str, Field(min_length=1, max_length=1024)]
    load_inplace: bool = False


class UnloadBody(BaseModel):
    lora_name: Name


class AskedChange(DirectAnswer, frozen=True, kw_only=True):
    name: str
    path: str | None = None
    is_in_place: bool = False


def _asked_load(body: LoadBody, model: ServedModel, limits: CallLimits) -> AskedChange:
    if not body.lora_name.isprintable():
        raise ApiError(400, "lora_name: must be of printable characters", param="lora_name")
    if body.lora_name == model.name:
        message = f"lora_name={body.lora_name!r}: is what the model itself is served as"
        raise ApiError(400, message, param="lora_name")
    return AskedChange(
        memoryview(b""), name=body.lora_name, path=body.lora_path, is_in_place=body.load_inplace
    )


def _asked_unload(body: UnloadBody, model: ServedModel, limits: CallLimits) -> AskedChange:
    return AskedChange(memoryview(b""), name=body.lora_name)


LOAD: Final = Endpoint("/v1/load_lora_adapter", LoadBody, _asked_load, AskedChange)
UNLOAD: Final = Endpoint("/v1/unload_lora_adapter", UnloadBody, _asked_unload, AskedChange)


class AdapterChanges:
    """The adapters that are served, as the launcher says, and the changes that this gateway has asked it for."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self._is_told = asyncio.Event()
        # Sends a message to the launcher; None: there is no connection to it.
        self.send: Callable[[ChangeAdapters], None] | None = None
        self._asked: dict[int, asyncio.Future[AdaptersChanged]] = {}
        self._tickets = itertools.count(1)

    def serve(self, adapters: Mapping[str, str]) -> None:
        self._model.set_adapters(adapters)
        self._is_told.set()

    async def until_served(self, linked: asyncio.Task[None]) -> None:
        """Returns when the launcher has said which adapters there are, or `linked`, the connection to it, has ended."""
        waiting = asyncio.create_task(self._is_told.wait())
        await asyncio.wait({waiting, linked}, return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()

    async def make(self, change: AskedChange) -> None:
        """Returns when the change is made everywhere. Raises ApiError if it was not."""
        if self.send is None:
            raise unavailable("the launcher, which loads adapters, can't be reached")
        ticket = next(self._tickets)
        answer = self._asked[ticket] = asyncio.get_running_loop().create_future()
        self.send(ChangeAdapters(ticket, change.name, change.path, change.is_in_place))
        try:
            found = await asyncio.wait_for(answer, LOAD_S)
        except TimeoutError:
            raise unavailable("the launcher, which loads adapters, does not answer") from None
        finally:
            del self._asked[ticket]
        if found.status != 200:
            raise ApiError(found.status, found.reason, param="lora_name" if found.status == 404 else None)

    def made(self, answer: AdaptersChanged) -> None:
        if (asked := self._asked.get(answer.ticket)) and not asked.done():
            asked.set_result(answer)

    def lost(self) -> None:
        """Ends all calls: the launcher that knew them is gone, or has made the change without a way to say so."""
        self.send = None
        for ticket, asked in self._asked.items():
            if not asked.done():
                asked.set_result(AdaptersChanged(ticket, 503, "the launcher, which loads adapters, was lost"))


def adapter_routes(request_builder: RequestBuilder, changes: AdapterChanges) -> APIRouter:
    routes = APIRouter()

    async def changed(http: Request, endpoint: Endpoint, done: str) -> Response:
        require_operator(http)
        asked = await request_builder.preparer.answer(endpoint, await json_body(http), owner_of(http))
        assert isinstance(asked, AskedChange)
        await changes.make(asked)
        return PlainTextResponse(f"Success: LoRA adapter '{asked.name}' {done} successfully.")

    @routes.post(LOAD.path, response_class=PlainTextResponse, openapi_extra=request_body(LoadBody))
    async def load_adapter(http: Request) -> Response:
        return await changed(http, LOAD, "added")

    @routes.post(UNLOAD.path, response_class=PlainTextResponse, openapi_extra=request_body(UnloadBody))
    async def unload_adapter(http: Request) -> Response:
        return await changed(http, UNLOAD, "removed")

    @routes.post("/reset_prefix_cache", response_class=Response)
    @routes.post("/flush_cache", response_class=Response)
    async def reset_prefix_cache(http: Request) -> Response:
        require_operator(http)
        await request_builder.islands.reset_prefix_cache()
        return Response()

    return routes
