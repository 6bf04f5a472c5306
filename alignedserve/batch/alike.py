"""Lines that begin alike run together, so that they share the KV of their beginning: it is computed once for those that
run at a time, and is still there for the next ones.

A file's lines are ordered in windows, which bounds the memory that they take: within a window by their bodies, as the
client has written them. A shared system prompt or document comes early there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from zlib import crc32

from alignedserve.batch.config import WINDOW_BYTES, WINDOW_LINES
from alignedserve.batch.lines import Line

_BODY = b'"body"'
# Where the pieces of a body end by which it is compared: the longer the beginning that two have in common, the more of
# them are the same.
_ENDS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PIECES = tuple(pairwise(_ENDS))


# The checksums of the pieces of a body's beginning.
Beginning = tuple[int, ...]


async def alike_together(lines: AsyncIterator[Line]) -> AsyncIterator[Line]:
    """Yields all lines, in windows. Those that begin like no other keep their order."""
    window: list[tuple[Beginning, Line]] = []
    num_bytes = 0
    async for line in lines:
        window.append((_beginning(line), line))
        num_bytes += len(line.text or b"")
        if len(window) == WINDOW_LINES or num_bytes >= WINDOW_BYTES:
            for each in _taken(window):
                yield each
            num_bytes = 0
    for each in _taken(window):
        yield each


def _taken(window: list[tuple[Beginning, Line]]) -> Iterator[Line]:
    """Takes the lines out of the window: what has been taken is not kept."""
    # For each beginning, the first line that has it.
    firsts: dict[Beginning, int] = {}

    def place(item: tuple[Beginning, Line]) -> list[int]:
        beginning, number = item[0], item[1].number
        ends = range(1, len(beginning) + 1)
        return [*(firsts.setdefault(beginning[:end], number) for end in ends), number]

    window.sort(key=place)
    window.reverse()
    while window:
        yield window.pop()[1]


def _beginning(line: Line) -> Beginning:
    text = line.text or b""
    start = max(0, text.find(_BODY))
    return tuple(
        crc32(text[start + first : start + end]) for first, end in _PIECES if start + first < len(text)
    )
