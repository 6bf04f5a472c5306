"""Splits a file's chunks into lines. At most one chunk and one line are in memory, and the event loop gets regular
turns."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from alignedserve.batch.config import MAX_LINE_BYTES, MAX_LINES_WITH_BLANKS, STEP_BYTES, STEP_LINES
from alignedserve.batch.loop_turns import LoopTurns


@dataclass(frozen=True)
class Line:
    # Starts at 1.
    number: int
    # Without the line break; None if the line is too long.
    text: bytes | None

    @property
    def is_blank(self) -> bool:
        return self.text == b""


class TooManyLines(Exception):
    """The file has too many lines, blank ones included."""


class LineSplitter:
    """Splits a stream of chunks into lines."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._number = 0
        # The current line so far, and whether it is already too long.
        self._open = bytearray()
        self._is_too_long = False

    def feed(self, data: bytes) -> Iterator[Line]:
        """Yields the lines lazily. A list would have half a million objects for some chunks."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._add(data[start:end])
            yield self.end()
            start = end + 1
        self._add(data[start:])

    def end(self) -> Line:
        """Ends the current line, at a line break or at the end of the file, and returns it."""
        self._number += 1
        if self._number == 1:
            # A byte order mark only announces UTF-8. It is not part of the line.
            self._open = self._open.removeprefix(BOM_UTF8)
        text = None if self._is_too_long else bytes(self._open.strip())
        self._open.clear()
        self._is_too_long = False
        return Line(self._number, text)

    def _add(self, piece: bytes) -> None:
        self._open += piece
        if len(self._open) > self._max_line_bytes:
            self._is_too_long = True
            self._open.clear()


async def lines_of(chunks: AsyncIterator[bytes], turns: LoopTurns) -> AsyncIterator[Line]:
    """Yields the lines that are not blank. After every step it waits for a turn on the event loop. A step includes the
    caller's work on its lines. Raises TooManyLines."""
    num_lines = num_bytes = 0
    async for line in _all_lines_of(chunks):
        if line.number > MAX_LINES_WITH_BLANKS:
            raise TooManyLines
        num_lines += 1
        num_bytes += len(line.text or b"")
        if num_lines >= STEP_LINES or num_bytes >= STEP_BYTES:
            await turns.next()
            num_lines = num_bytes = 0
        if not line.is_blank:
            yield line


async def _all_lines_of(chunks: AsyncIterator[bytes]) -> AsyncIterator[Line]:
    splitter = LineSplitter()
    async for chunk in chunks:
        for line in splitter.feed(chunk):
            yield line
    last = splitter.end()
    if not last.is_blank:
        yield last
