"""A file's lines, from its chunks, with no more than a chunk and a line in memory."""

from __future__ import annotations

from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

from alignedserve.batch.config import MAX_LINE_BYTES
from alignedserve.batch.patience import patiently
from alignedserve.store import FileId, Store


@dataclass(frozen=True)
class Line:
    # from 1
    number: int
    # without its end; None: longer than a line may be
    text: bytes | None


class FileGone(Exception):
    """The file was there, and is not any more."""


class LineSplitter:
    """Bytes in, lines out; blank ones are counted, and left out."""

    def __init__(self, max_line_bytes: int = MAX_LINE_BYTES) -> None:
        self._max_line_bytes = max_line_bytes
        self._number = 0
        # the beginning of a line; and whether it is too long already
        self._open = bytearray()
        self._is_too_long = False

    def feed(self, data: bytes) -> Iterator[Line]:
        """One after the other: a chunk of half a million lines is not half a million objects."""
        start = 0
        while (end := data.find(b"\n", start)) >= 0:
            self._add(data[start:end])
            yield from self.end()
            start = end + 1
        self._add(data[start:])

    def end(self) -> list[Line]:
        """The line ends here: at a line's end, or at the file's. One at most."""
        self._number += 1
        if self._number == 1:
            # it says that what follows is UTF-8, and is no part of it
            self._open = self._open.removeprefix(BOM_UTF8)
        text, is_too_long = bytes(self._open).strip(), self._is_too_long
        self._open.clear()
        self._is_too_long = False
        if is_too_long:
            return [Line(self._number, None)]
        return [Line(self._number, text)] if text else []

    def _add(self, piece: bytes) -> None:
        self._open += piece
        if len(self._open) > self._max_line_bytes:
            self._is_too_long = True
            self._open.clear()


async def lines_of(store: Store, file_id: FileId) -> AsyncIterator[Line]:
    """Raises FileGone."""
    file = await patiently(store.file, file_id)
    if file is None:
        raise FileGone(file_id)
    splitter = LineSplitter()
    for number in range(file.num_chunks):
        chunk = await patiently(store.chunk, file_id, number)
        if chunk is None:
            raise FileGone(file_id)
        for line in splitter.feed(chunk):
            yield line
    for line in splitter.end():
        yield line
