"""uvicorn with this gateway's settings."""

from __future__ import annotations

import contextlib
import functools
import socket
from collections.abc import Iterator

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
# The most connections that wait in the kernel; NUM_AT_ONCE of them are accepted in one turn of the event loop.
MAX_WAITING = 2048
NUM_AT_ONCE = 64


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI, around: Around, max_connections: int = Limits.max_connections) -> None:
        self.connections = Connections(fitting(max_connections))
        super().__init__(
            uvicorn.Config(
                RequestIdMiddleware(app, around),
                http=functools.partial(Connection, self.connections),  # type: ignore[arg-type]
                ws="none",
                proxy_headers=False,
                log_config=None,
                access_log=False,
                backlog=NUM_AT_ONCE,
                # Framing has a smaller limit, and its error comes in OpenAI's envelope.
                h11_max_incomplete_event_size=2 * MAX_HEAD_BYTES,
                timeout_graceful_shutdown=GOODBYE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for each in sockets or []:
            # asyncio takes its `backlog` for both numbers.
            each.listen(MAX_WAITING)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leaves signals alone: the process handles them."""
        yield
