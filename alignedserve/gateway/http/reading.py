"""Receives a request's body as bytes, and limits it while it arrives: its size, its speed, and the memory of all bodies
together. Parsing happens elsewhere (generation/preparer.py)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import Iterator
from http import HTTPStatus

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import Message, Receive, Send

from alignedserve.gateway.http.errors import ApiError, BodyError, unavailable

# seconds that the server waits for the next byte of a body
IDLE_S = 10.0
# Seconds that a whole body may take, plus one second per MIN_BYTES_PER_S bytes: 9 minutes for 8 MiB.
GRACE_S = 30.0
MIN_BYTES_PER_S = 16 << 10
# Bytes of each body that are accepted, however much memory the others have.
SMALL_BYTES = 64 << 10
# Seconds within which a small unneeded body is received and dropped, to keep the connection.
DROPPING_S = 2.0


class Share:
    """One body's share of the memory for all bodies."""

    def __init__(self, memory: BodyMemory, holder: str) -> None:
        self._memory = memory
        self._holder = holder
        self._is_closed = False
        self.num_bytes = 0

    def can_grow(self, num_bytes: int) -> bool:
        """Whether it may grow to `num_bytes`."""
        more = num_bytes - self.num_bytes
        return num_bytes <= SMALL_BYTES or self._memory.has_room(self._holder, more)

    def add(self, more: int) -> None:
        """Adds `more` bytes, which may be negative. Raises ApiError if there is not enough memory."""
        if more > 0 and not self.can_grow(self.num_bytes + more):
            raise no_room()
        self.grow(self.num_bytes + more)

    def grow(self, num_bytes: int) -> None:
        """Makes it `num_bytes`. Does nothing once it is closed."""
        if not self._is_closed:
            self._memory.add(self._holder, num_bytes - self.num_bytes)
            self.num_bytes = num_bytes

    def close(self) -> None:
        """Frees its memory."""
        self.grow(0)
        self._is_closed = True


class BodyMemory:
    def __init__(self, max_bytes: int, max_share: float = 0.5) -> None:
        """One holder may have `max_share` of the memory, so that there is some for others."""
        self._max_bytes = max_bytes
        self._max_of_holder = max_bytes * max_share
        self._num_bytes: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        return self._num_bytes.total()

    def has_room(self, holder: str, num_bytes: int) -> bool:
        of_holder = self._num_bytes[holder] + num_bytes
        return of_holder <= self._max_of_holder and self.num_bytes + num_bytes <= self._max_bytes

    def add(self, holder: str, num_bytes: int) -> None:
        self._num_bytes[holder] += num_bytes
        if not self._num_bytes[holder]:
            del self._num_bytes[holder]

    @contextlib.contextmanager
    def share(self, holder: str) -> Iterator[Share]:
        """Yields the share of one body, which is freed when the block ends."""
        found = Share(self, holder)
        try:
            yield found
        finally:
            found.close()


class BodyReading:
    def __init__(
        self, receive: Receive, headers: Headers, share: Share, max_bytes: int, max_held_bytes: int
    ) -> None:
        """`max_held_bytes` is how much of the body is in memory at a time, at most."""
        self._receive = receive
        self._share = share
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        # Framing has refused values that are no number.
        self._announced = int(headers.get("content-length", "0"))
        self._is_chunked = "transfer-encoding" in headers
        # Whether the client sends the body only after an interim answer, which `receive` sends.
        self._is_held_back = "expect" in headers
        self._is_whole = not self._announced and not self._is_chunked
        self._is_broken = False
        self._num_bytes = 0
        # The part of them in this body's share. The share may have more, because memory that the call needs later
        # counts there, too.
        self._num_held = 0
        # Seconds that were spent waiting for the client, without this server's own time.
        self._waited_s = 0.0

    def refusal(self) -> ApiError | None:
        """Returns the error for a body that is announced as too large. None: it is accepted."""
        if self._announced > self._max_bytes:
            return too_large(self._max_bytes)
        return None if self._share.can_grow(min(self._announced, self._max_held_bytes)) else no_room()

    async def receive(self) -> Message:
        """Receives the next piece of the body. After the last one, waits for the client to disconnect."""
        if self._is_whole:
            return await self._receive()
        message = await self._next()
        self._is_whole = not message.get("more_body", False)
        self._num_bytes += len(message.get("body", b""))
        if self._num_bytes > self._max_bytes:
            raise self._broken(too_large(self._max_bytes))
        num_held = min(self._num_bytes, self._max_held_bytes)
        try:
            self._share.add(num_held - self._num_held)
        except ApiError as error:
            raise self._broken(error) from None
        self._num_held = num_held
        return message

    async def _next(self) -> Message:
        left_s = GRACE_S + self._num_bytes / MIN_BYTES_PER_S - self._waited_s
        begun_s = time.monotonic()
        try:
            async with asyncio.timeout(min(left_s, IDLE_S)):
                return await self._receive()
        except TimeoutError:
            message = f"the body arrives too slowly: {self._num_bytes} bytes so far"
            raise self._broken(ApiError(408, message)) from None
        finally:
            self._waited_s += time.monotonic() - begun_s

    def _broken(self, error: ApiError) -> BodyError:
        self._is_broken = True
        return BodyError(error)

    async def drop(self) -> None:
        """Receives and drops an unneeded body, if it is small, so that the connection can be used again."""
        with contextlib.suppress(TimeoutError, BodyError):
            async with asyncio.timeout(DROPPING_S):
                while not self._is_whole and self._is_small and not self._is_held_back:
                    await self.receive()
        self._is_broken = not self._is_whole

    @property
    def _is_small(self) -> bool:
        return not self._is_chunked and self._announced <= SMALL_BYTES

    def answering(self, send: Send) -> Send:
        """Closes the connection after an answer that begins before the body has ended: otherwise the rest would have to
        be received first."""

        async def sending(message: Message) -> None:
            is_last = not self._is_whole and (self._is_broken or not self._is_small)
            if message["type"] == "http.response.start" and is_last:
                MutableHeaders(scope=message)["Connection"] = "close"
            await send(message)

        return sending


def too_large(max_bytes: int, counting: str = "") -> ApiError:
    """Returns the error for a body that is too large. `counting` names what counts besides the body."""
    phrase = HTTPStatus(413).phrase.lower()
    message = f"{phrase}: {counting}the body may have at most {max_bytes} bytes"
    return ApiError(413, message, code="body_too_large")


def no_room() -> ApiError:
    return unavailable("the bodies of other requests take all the memory for bodies")


async def json_body(http: Request) -> list[bytes]:
    """Returns the body in pieces, because joining them could hold up other requests. Raises ApiError unless the content
    type is JSON: a page can make a browser send other types without a preflight request."""
    kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    main, _, sub = kind.partition("/")
    if main != "application" or not (sub == "json" or sub.endswith("+json")):
        raise ApiError(400, "the body must be JSON, and come with the header Content-Type: application/json")
    return [piece async for piece in http.stream() if piece]
