"""JSON of any size, written in pieces, and answers that are sent in pieces.

An answer with log-probabilities has tens of megabytes, and writing it must not delay the tokens of other requests.
Pieces may be empty: each ends a step."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

Json = dict[str, Any]
Piece = bytes | bytearray | memoryview

# seconds after which other requests get their turn
STEP_S = 0.001
BLOCK_BYTES = 1 << 16
_STEP_NUMBERS = 4096

encode = msgspec.json.Encoder().encode
# Long bodies are written one after another, in each event loop.
_turns: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock] = WeakKeyDictionary()


def event_named(name: str, body: Json) -> bytes:
    """Encodes a server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + encode(body) + b"\n\n"


def object_of(body: Mapping[str, Any], members: Mapping[str, Iterable[Piece]]) -> Iterator[Piece]:
    """Writes `body`, which is not empty, with further members."""
    yield encode(body)[:-1]
    for name, pieces in members.items():
        yield b"," + encode(name) + b":"
        yield from pieces
    yield b"}"


def array_of(items: Iterable[Iterable[Piece]]) -> Iterator[Piece]:
    yield b"["
    for number, pieces in enumerate(items):
        if number:
            yield b","
        yield from pieces
    yield b"]"


def list_of(numbers: Sequence[int]) -> Iterator[Piece]:
    yield b"["
    for start in range(0, len(numbers), _STEP_NUMBERS):
        yield b"," * (start > 0) + encode(numbers[start : start + _STEP_NUMBERS])[1:-1]
    yield b"]"


class Columns:
    """Named arrays that grow together, kept as JSON bytes. As objects they would take twenty times the memory."""

    def __init__(self) -> None:
        self._texts: dict[str, bytearray] = {}

    def add(self, columns: Mapping[str, Sequence[Any]]) -> None:
        for name, values in columns.items():
            self._append(name, encode(values)[1:-1])

    def extend(self, others: Columns) -> None:
        for name, text in others._texts.items():
            self._append(name, text)

    def pieces(self) -> Iterator[Piece]:
        yield b"{"
        for number, (name, pieces) in enumerate(self.members().items()):
            yield b"," * (number > 0) + encode(name) + b":"
            yield from pieces
        yield b"}"

    def members(self) -> dict[str, Iterable[Piece]]:
        return {name: (b"[", text, b"]") for name, text in self._texts.items()}

    def _append(self, name: str, text: Piece) -> None:
        column = self._texts.setdefault(name, bytearray())
        if column and text:
            column += b","
        column += text


async def blocks_of(pieces: Iterable[Piece]) -> list[bytes | memoryview]:
    """Joins all pieces into blocks."""
    steps = _steps(pieces)
    blocks, is_whole = next(steps)
    if is_whole:
        return blocks
    async with _turns.setdefault(asyncio.get_running_loop(), asyncio.Lock()):
        for blocks, _ in steps:  # noqa: B007
            await asyncio.sleep(0)
    return blocks


def _steps(pieces: Iterable[Piece]) -> Iterator[tuple[list[bytes | memoryview], bool]]:
    """Yields the same list after each step, and whether that was the last step."""
    blocks: list[bytes | memoryview] = []
    block = bytearray()
    due_s = time.monotonic() + STEP_S
    for piece in pieces:
        if len(piece) < BLOCK_BYTES:
            block += piece
        else:
            blocks += [bytes(block), *_cut(piece)]
            block.clear()
        if len(block) >= BLOCK_BYTES:
            blocks.append(bytes(block))
            block.clear()
        if time.monotonic() > due_s:
            yield blocks, False
            due_s = time.monotonic() + STEP_S
    blocks.append(bytes(block))
    yield blocks, True


def _cut(piece: Piece) -> Iterator[memoryview]:
    """Cuts a piece into blocks without a copy."""
    view = memoryview(piece)
    return (view[start : start + BLOCK_BYTES] for start in range(0, len(view), BLOCK_BYTES))


async def json_response(pieces: Iterable[Piece], headers: Mapping[str, str] | None = None) -> Response:
    """Returns a response with a complete body."""
    blocks = await blocks_of(pieces)
    if len(blocks) == 1:
        return Response(blocks[0], media_type="application/json", headers=headers)
    headers = {**(headers or {}), "Content-Length": str(sum(map(len, blocks)))}
    return AnswerStream(_in_turn(blocks), media_type="application/json", headers=headers)


async def _in_turn(blocks: Iterable[bytes | memoryview]) -> AsyncIterator[bytes | memoryview]:
    for block in blocks:
        yield block
        # Without this, a client that reads fast would get all of it in one turn.
        await asyncio.sleep(0)


class AnswerStream(StreamingResponse):
    """A StreamingResponse without reference cycles. Starlette's own ends a stream by a task group with exceptions and
    frames that refer to each other. When a thousand clients disconnected, Python's garbage collector found 200,000
    objects at once, and held everything up for 0.4 s."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self.stream_response(send))
        watching = asyncio.ensure_future(self.listen_for_disconnect(receive))
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
            (sending if sending.done() else watching).result()
        finally:
            sending.cancel()
            watching.cancel()
            # On return, the source of the pieces has released all that it holds.
            await asyncio.wait({sending, watching})
