"""uvicorn with this gateway's settings."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
from collections.abc import Iterator, Sequence

import uvicorn
from fastapi import FastAPI

from alignedserve.gateway.http.connection import HEAD_S, Connection
from alignedserve.gateway.http.connections import Connections, fitting
from alignedserve.gateway.http.framing import MAX_HEAD_BYTES
from alignedserve.gateway.http.request_id import Around, RequestIdMiddleware
from alignedserve.gateway.limits import Limits

# Streams that are open when the server stops get so many seconds to end.
GOODBYE_S = 1
# A connection waits so many seconds for its next request: longer than clients keep theirs (httpx, and with it
# OpenAI's: 5 s), or a client could send a request on a connection that is just being closed.
KEEP_ALIVE_S = int(HEAD_S)
# So many connections are accepted in one turn of the event loop; by one of several gateways, which share them, one.
NUM_AT_ONCE, NUM_AT_ONCE_SHARED = 64, 1
# The seconds in which connections that were accepted last are known to the event loop: it takes two turns.
TURNS_S = 0.05
LOOK_S = 0.1


class Server(uvicorn.Server):
    def __init__(
        self,
        app: FastAPI,
        around: Around,
        max_connections: int = Limits.max_connections,
        is_shared: bool = False,
    ) -> None:
        """`is_shared`: other gateways take connections from the same socket."""
        self.connections = Connections(fitting(max_connections))
        self._sockets: Sequence[socket.socket] = ()
        super().__init__(
            uvicorn.Config(
                RequestIdMiddleware(app, around),
                http=functools.partial(Connection, self.connections),  # type: ignore[arg-type]
                ws="none",
                proxy_headers=False,
                log_config=None,
                access_log=False,
                backlog=NUM_AT_ONCE_SHARED if is_shared else NUM_AT_ONCE,
                # Framing has a smaller limit, and its error comes in OpenAI's envelope.
                h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,
                timeout_graceful_shutdown=GOODBYE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    async def retire(self) -> None:
        """Takes no more connections, and returns when those that it has are closed: each after its next answer, or when
        it has been idle for long. Others go on taking them from the same socket."""
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            loop.remove_reader(each)
        self.connections.is_retiring = True
        # Were it closed at once, asyncio would forget a connection that it has just accepted.
        await asyncio.sleep(TURNS_S)
        for server in self.servers:
            server.close()
        while len(self.connections):
            await asyncio.sleep(LOOK_S)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._sockets = sockets or []

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: the process handles them."""
        yield
