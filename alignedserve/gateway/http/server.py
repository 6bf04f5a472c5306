"""uvicorn with this gateway's settings."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator, Sequence
from typing import Protocol

import uvicorn
from fastapi import FastAPI

from alignedserve.gateway.http.connection import HEAD_S, HttpConnection
from alignedserve.gateway.http.connections import Connections, fitting
from alignedserve.gateway.http.framing import MAX_HEAD_BYTES
from alignedserve.gateway.http.keys import Keys
from alignedserve.gateway.http.request_id import Around, RequestIdMiddleware
from alignedserve.gateway.limits.limits import CallLimits

# seconds that open streams have to end when the server stops
GOODBYE_S = 1
# Seconds that a connection waits for its next request. Clients keep theirs for less (httpx2 and OpenAI's client: 5 s),
# so they send no request on a connection that is being closed.
KEEP_ALIVE_S = int(HEAD_S)
# Connections that are accepted in one turn of the event loop: by a single gateway, and by each of several.
NUM_AT_ONCE, NUM_AT_ONCE_SHARED = 64, 1
# Seconds after which the event loop has registered connections that were accepted last: that takes two turns.
TURNS_S = 0.05
LOOK_S = 0.1


class HttpServer(Protocol):
    # Once this is set, `serve` returns soon.
    should_exit: bool

    async def serve(self, sockets: list[socket.socket] | None = None) -> None: ...

    async def until_started(self) -> None:
        """Returns when the server accepts connections."""

    async def retire(self) -> None:
        """Closes the listener. Returns when all open connections are closed."""


class GatewayServer(uvicorn.Server):
    def __init__(
        self,
        app: FastAPI,
        around: Around,
        max_connections: int = CallLimits.max_connections,
        is_shared: bool = False,
        keys: Keys | None = None,
    ) -> None:
        """`is_shared`: other gateways accept connections from the same socket."""
        keys, num_fitting = keys or Keys(), fitting(max_connections)
        # Without keys, the address is all that tells clients apart, and they may all be behind one proxy.
        max_of_address = num_fitting if not keys.are_needed else max(num_fitting // 2, 1)
        self.connections = Connections(num_fitting, max_of_address)
        self._sockets: Sequence[socket.socket] = ()
        self._started = asyncio.Event()
        super().__init__(
            uvicorn.Config(
                RequestIdMiddleware(app, around),
                http=functools.partial(HttpConnection, self.connections, keys),  # type: ignore[arg-type]
                ws="none",
                proxy_headers=False,
                log_config=None,
                access_log=False,
                backlog=NUM_AT_ONCE_SHARED if is_shared else NUM_AT_ONCE,
                # Framing has a smaller limit, and its error has OpenAI's envelope.
                h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,
                timeout_graceful_shutdown=GOODBYE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    async def retire(self) -> None:
        """Accepts no more connections. Returns when all are closed, each after its next answer, or after it was idle
        for long. Other gateways continue to accept connections from the same socket."""
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.remove_reader(each)
        self.connections.is_retiring = True
        # If it were closed at once, asyncio would drop connections that it has just accepted.
        await asyncio.sleep(TURNS_S)
        for server in self.servers:
            server.close()
        while len(self.connections):
            await asyncio.sleep(LOOK_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sockets = sockets or []
        if self.started:
            self._started.set()

    async def until_started(self) -> None:
        """Returns when the server accepts connections."""
        await self._started.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals to the process, which handles them."""
        yield
