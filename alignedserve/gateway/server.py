"""uvicorn, as this gateway needs it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from alignedserve.gateway.calls import Around, Calls

# Streams that are open when the server stops get so long to say goodbye.
GOODBYE_S = 1
# A connection waits so long for its next request: longer than clients keep theirs (httpx, and with it OpenAI's: 5 s),
# or one that is just being closed would be given a request.
KEEP_ALIVE_S = 20
# A request's head comes within this, once it is begun or the connection stands.
HEAD_S = 20.0
# A client that takes nothing of an answer for so long has gone, or might as well have.
HEARD_S = 60.0
# What was written last before a connection is closed leaves within this.
CLOSE_S = 60.0


class Server(uvicorn.Server):
    def __init__(self, app: FastAPI, around: Around) -> None:
        super().__init__(
            uvicorn.Config(
                Calls(app, around),
                http=Connection,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=GOODBYE_S,
                timeout_keep_alive=KEEP_ALIVE_S,
            )
        )

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the process's affair, not the server's."""
        yield


class _Open:
    """A transport that is written to as long as it is open: asyncio drops the rest too, with a warning for each piece,
    and of a burst there may be hundreds before it tells anybody that the client has gone."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


class Connection(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
    """Whoever does not say what he wants, or does not listen, loses it: uvicorn would wait for ever."""

    _unheard: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:
        super().connection_made(_Open(transport))
        self._idle_since_s = self.loop.time()
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        self._heard()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        self._idle_since_s = self.loop.time()
        super().on_response_complete()

    def pause_writing(self) -> None:
        self._unheard = self.loop.call_later(HEARD_S, self.transport.abort)
        super().pause_writing()

    def resume_writing(self) -> None:
        self._heard()
        super().resume_writing()

    def _heard(self) -> None:
        if self._unheard:
            self._unheard.cancel()

    def _watch(self) -> None:
        if self.transport.is_closing():
            # it waits for somebody to read what is left
            self._timer = self.loop.call_later(CLOSE_S, self.transport.abort)
            return
        is_busy = self.cycle is not None and not self.cycle.response_complete
        left_s = HEAD_S if is_busy else self._idle_since_s + HEAD_S - self.loop.time()
        if left_s <= 0:
            self.transport.close()
        self._timer = self.loop.call_later(max(left_s, 0.0), self._watch)
