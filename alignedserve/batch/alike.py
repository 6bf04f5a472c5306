"""Reorders lines so that those with a common beginning run together and share its KV. Lines that run at the same time
compute it once, and the next ones still find it.

Lines are sorted within windows, which bounds memory, and by their bodies as the client wrote them. A shared system
prompt or document comes early in a body.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import pairwise
from zlib import crc32

from alignedserve.batch.config import WINDOW_BYTES, WINDOW_LINES
from alignedserve.batch.lines import Line

_BODY = b'"body"'
# Boundaries of the pieces by which bodies are compared. The longer the common beginning of two bodies, the more of
# their pieces are equal.
_ENDS = (0, 256, 512, 1024, 2048, 4096, 8192, 16384)
_PIECES = tuple(pairwise(_ENDS))


# Checksums of the pieces at the beginning of a body.
Beginning = tuple[int, ...]


async def alike_together(lines: AsyncIterator[Line]) -> AsyncIterator[Line]:
    """Yields all lines, window by window. Lines without a common beginning keep their order."""
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
    """Yields the window's lines in their new order, and removes each of them."""
    # The first line with each beginning.
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
