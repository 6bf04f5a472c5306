"""A gateway in virtual time: the real process, except for its sockets, which clients do without, and its store."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from typing import cast

from fastapi import FastAPI
from starlette.types import ASGIApp

from alignedserve.gateway.config import GatewayConfig
from alignedserve.gateway.http.request_id import RequestIdMiddleware
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.process import GatewayProcess
from alignedserve.protocol.address import RouterAddress
from alignedserve.store import Store
from alignedserve.vopr.front_end.http_call import JSON, HttpCall
from alignedserve.vopr.front_end.preparer_in_place import PreparerInPlace
from alignedserve.vopr.front_end.virtual_loop import VirtualLoop
from alignedserve.vopr.front_end.virtual_process import Lives
from alignedserve.vopr.front_end.virtual_transport import VirtualSocket


class VirtualGateway(Lives):
    def __init__(
        self, loop: VirtualLoop, config: GatewayConfig, model: ServedModel, store: Callable[[str], Store]
    ) -> None:
        """`store` returns the store connection of the process with this name."""
        self.name = config.instance_id
        self._life: _Life | None = None
        self._loop = loop
        self._config = config
        self._model = model
        self._store = store
        self._num_lives = 0

    @property
    def num_open(self) -> int:
        return self._life.gateway.num_open if self._life and self.is_up else 0

    def start(self) -> None:
        if self.is_up:
            raise RuntimeError(f"{self.name} is started, but is already up")
        self._num_lives += 1
        name = f"{self.name} life {self._num_lives}"
        process = self.process = self._loop.new_process(name)
        self._life = _Life(self._config, self._store(name))
        sock = cast(socket.socket, VirtualSocket(("127.0.0.1", 8000)))
        running = process.start(self._life.gateway.serve(self._model, sock))
        running.add_done_callback(lambda _: process.kill())

    def stop(self) -> None:
        """Lets it end by itself, in good order, unless it hangs."""
        if self.process:
            self.process.send_signal(signal.SIGTERM)

    def set_islands(self, routers: Mapping[int, RouterAddress]) -> None:
        """Tells it which islands exist, as the launcher does."""
        if self.process and self._life and self._life.server and self._life.server.is_serving:
            self._loop.call_soon(self._life.gateway.set_islands, routers, context=self.process.context)

    def set_clock_ahead(self, seconds: float) -> None:
        """Sets its wall clock ahead. The clock of its next life is right."""
        if self.process:
            self.process.wall_ahead_s += seconds

    def set_clock_right(self) -> None:
        if self.process:
            self.process.wall_ahead_s = 0.0

    def call(
        self, method: str, path: str, body: bytes = b"", kind: str = JSON, request_id: str = ""
    ) -> HttpCall | None:
        """Returns the call of a client; None if no process listens."""
        if not self.is_up or not self._life or self._life.server is None or not self._life.server.is_serving:
            return None
        assert self.process
        return HttpCall(self.process, self._life.server.app, method, path, body, kind, request_id)


class _Life:
    def __init__(self, config: GatewayConfig, store: Store) -> None:
        self.server: _AppServer | None = None
        self.gateway = _Gateway(config, store, self)


class _AppServer:
    """Replaces uvicorn."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app
        self.is_serving = False
        self._exit = asyncio.Event()

    @property
    def should_exit(self) -> bool:
        return self._exit.is_set()

    @should_exit.setter
    def should_exit(self, is_asked: bool) -> None:
        if is_asked:
            self._exit.set()

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self.is_serving = True
        await self._exit.wait()
        self.is_serving = False

    async def until_started(self) -> None:
        """Returns at once, because there is no launcher to tell."""

    async def retire(self) -> None:
        raise NotImplementedError("no other gateway takes a virtual one's place while it runs")


class _Gateway(GatewayProcess):
    preparer_class = PreparerInPlace

    def __init__(self, config: GatewayConfig, store: Store, life: _Life) -> None:
        super().__init__(config)
        self._link = store
        self._life = life

    @property
    def num_open(self) -> int:
        return self._islands.num_open

    def set_islands(self, routers: Mapping[int, RouterAddress]) -> None:
        self._islands.set(routers)

    @contextlib.asynccontextmanager
    async def open_store(self) -> AsyncIterator[Store | None]:
        yield self._link

    def make_server(self, app: FastAPI) -> _AppServer:
        self._life.server = _AppServer(RequestIdMiddleware(app, self.telemetry.traces.around))
        return self._life.server
