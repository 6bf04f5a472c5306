"""An HTTP call of a simulated client, made to the gateway's ASGI application.

It starts where uvicorn calls the application. HTTP parsing has its own fuzz tests, and would take most of a run's time.
The client may read slowly, which makes the application wait as with uvicorn, and it may leave at any time. The
connection breaks when the gateway dies.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp

from alignedserve.gateway.http.errors import AnswerBrokenOff
from alignedserve.vopr.front_end.virtual_process import VirtualProcess

# Unread bytes at which the application waits: those of uvicorn's buffer and of the kernels.
MAX_UNREAD_BYTES = 4096
JSON = "application/json"

Message = MutableMapping[str, Any]


class ConnectionBroken(Exception):
    """The connection broke before the answer was complete."""


@dataclass(frozen=True)
class HttpAnswer:
    status: int
    body: bytes


class HttpCall:
    def __init__(
        self,
        process: VirtualProcess,
        app: ASGIApp,
        method: str,
        path: str,
        body: bytes = b"",
        kind: str = JSON,
        request_id: str = "",
    ) -> None:
        self.status = 0
        self._process = process
        self._body: bytes | None = body
        self._unread: deque[bytes] = deque()
        self._num_unread = 0
        self._is_complete = self._is_broken = self._has_left = False
        # Set when something has changed for the client, and for the application.
        self._news, self._read = asyncio.Event(), asyncio.Event()
        process.on_kill(self, self._break)
        task = process.start(self._run(app, _scope(method, path, body, kind, request_id)), f"{method} {path}")
        task.add_done_callback(self._over)

    async def whole(self) -> HttpAnswer:
        """Returns the complete answer. Raises ConnectionBroken."""
        try:
            pieces = [piece async for piece in self.pieces()]
        finally:
            self.leave()
        return HttpAnswer(self.status, b"".join(pieces))

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yields the pieces of the answer as they arrive. Raises ConnectionBroken."""
        while True:
            if self._unread:
                piece = self._unread.popleft()
                self._num_unread -= len(piece)
                self._read.set()
                yield piece
            elif self._is_complete:
                return
            elif self._is_broken:
                raise ConnectionBroken
            else:
                self._news.clear()
                await self._news.wait()

    def leave(self) -> None:
        """Closes the client's end of the connection. Safe to repeat, and after the answer."""
        self._has_left = True
        self._read.set()

    # ---- the gateway's end ----

    async def _run(self, app: ASGIApp, scope: Message) -> None:
        # In this case uvicorn breaks the connection, too.
        with suppress(AnswerBrokenOff):
            await app(scope, self._receive, self._send)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        while not (self._has_left or self._is_complete):
            self._read.clear()
            await self._read.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._has_left:
            return
        if message["type"] == "http.response.start":
            self.status = message["status"]
            return
        if piece := bytes(message.get("body", b"")):
            self._unread.append(piece)
            self._num_unread += len(piece)
        self._is_complete = not message.get("more_body", False)
        self._news.set()
        while self._num_unread > MAX_UNREAD_BYTES and not self._has_left:
            self._read.clear()
            await self._read.wait()

    def _over(self, task: asyncio.Task[None]) -> None:
        self._process.forget(self)
        if not self._is_complete:
            self._break()

    def _break(self) -> None:
        self._is_broken = True
        self._news.set()


def _scope(method: str, path: str, body: bytes, kind: str, request_id: str) -> Message:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": _headers(body, kind, request_id),
        "client": ("client", 1),
        "server": ("gateway", 80),
        "state": {},
    }


def _headers(body: bytes, kind: str, request_id: str) -> list[tuple[bytes, bytes]]:
    headers = [(b"host", b"localhost"), (b"content-type", kind.encode())]
    if request_id:
        headers.append((b"x-request-id", request_id.encode()))
    if body:
        headers.append((b"content-length", str(len(body)).encode()))
    return headers
