"""A webhook receiver: a real HTTP server on loopback that stores events and answers as configured."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import openai

SECRET = "whsec_" + "c2VjcmV0" * 5
OTHER_SECRET = "whsec_" + "b3RoZXIh" * 5


@dataclass(frozen=True)
class Told:
    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def event(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.body)
        return found

    def unwrapped(self, secret: str = SECRET) -> Any:
        """Returns the event as OpenAI's client decodes it. Raises an error for a wrong signature."""
        client = openai.OpenAI(api_key="-", webhook_secret=secret)
        return client.webhooks.unwrap(self.body, self.headers)


@dataclass
class Receiver:
    port: int = 0
    scheme: str = "http"
    told: list[Told] = field(default_factory=list)
    # Returns the answer to the call with this number; None: no answer, and the connection stays open.
    answer: Callable[[int], bytes | None] = lambda number: b"HTTP/1.1 204 No Content\r\n\r\n"
    _has_come: asyncio.Event = field(default_factory=asyncio.Event)
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/hooks/all"

    async def until(self, count: int) -> list[Told]:
        """Waits until `count` calls have arrived."""
        async with asyncio.timeout(60):
            while len(self.told) < count:
                self._has_come.clear()
                await self._has_come.wait()
        return self.told

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task
        self._open.add(task)
        # The sender may give up, or be killed, at any moment.
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            first, *lines = head.strip().split("\r\n")
            headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
            body = await reader.readexactly(int(headers["content-length"]))
            self.told.append(Told(first.split(" ")[1], headers, body))
            answer = self.answer(len(self.told))
            self._has_come.set()
            if answer is None:
                await reader.read()
            else:
                writer.write(answer)
                await writer.drain()
        writer.close()
        self._open.discard(task)

    def close(self) -> None:
        for task in self._open:
            task.cancel()


def status(code: int, *headers: str) -> bytes:
    return "\r\n".join([f"HTTP/1.1 {code} Said", *headers, "content-length: 0", "", ""]).encode()


@asynccontextmanager
async def receiving(port: int = 0, tls: ssl.SSLContext | None = None) -> AsyncIterator[Receiver]:
    receiver = Receiver(scheme="https" if tls else "http")
    server = await asyncio.start_server(receiver.serve, "127.0.0.1", port, ssl=tls)
    receiver.port = server.sockets[0].getsockname()[1]
    try:
        yield receiver
    finally:
        server.close()
        receiver.close()


def unused_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port: int = sock.getsockname()[1]
    return port
