"""A file's lines, from its chunks, with no more than a chunk and a line in memory, and a step of lines at a time."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from alignedserve.batch.config import MAX_LINE_BYTES, MAX_LINES_WITH_BLANKS, STEP_BYTES, STEP_LINES
from alignedserve.batch.loop_turns import LoopTurns


@dataclass(frozen=True)
class Line:
    # Counted from 1.
    number: int
    # The line without its end; None: it is longer than a line may be.
    text: bytes | None

    @property
    def is_blank(self) -> bool:
        return self.text == b""


class TooManyLines(Exception):
    """The file has more lines than it may have, blank ones included."""


class LineSplitter:
    """Splits bytes that come in chunks into lines."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._number = 0
        # The beginning of the current line, and whether it is too long already.
        self._open = bytearray()
        self._is_too_long = False

    def feed(self, data: bytes) -> Iterator[Line]:
        """Yields the lines one by one: a chunk of half a million lines must not become half a million objects."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._add(data[start:end])
            yield self.end()
            start = end + 1
        self._add(data[start:])

    def end(self) -> Line:
        """Ends the current line, at a line's end or at the file's, and returns it."""
        self._number += 1
        if self._number == 1:
            # The byte order mark only says that UTF-8 follows, and is not part of the line.
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
    """Yields the lines that are not blank. The caller's work on a step's lines is part of the step. Raises
    TooManyLines."""
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
