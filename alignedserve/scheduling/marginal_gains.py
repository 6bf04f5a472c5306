"""Chooses requests by their gain per memory, where a request may get its memory at once or in halves. Pure.

This is the greedy algorithm of Apt-Serve (section 5): the highest gain per memory first, and a request's second half
only after its first. If a single first piece gains more than all of that, it is chosen instead. So the result gains at
least half of the optimum.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from alignedserve.kv.layout import Layout
from alignedserve.scheduling.boundary import DecodeRequest
from alignedserve.types import RequestKey


class Piece(NamedTuple):
    """Memory that a request may get, and its gain. A plan makes one or two pieces for each waiting request."""

    request: DecodeRequest
    # What the request has with this piece, and with the one before if this is the second.
    layout: Layout
    gain_s: float
    # In blocks: its current memory, by which gains are compared, and its memory after it has grown.
    memory: float
    num_blocks: int
    is_second: bool = False


def choose(pieces: Iterable[Piece], num_blocks: int, num_slots: int) -> list[Piece]:
    """Returns the last piece of each request that begins in these blocks and slots, with the gain of all its pieces, in
    the order in which the requests were chosen."""
    if num_slots <= 0:
        return []
    chosen: dict[RequestKey, Piece] = {}
    num_left, best = num_blocks, None
    for piece in sorted(pieces, key=lambda piece: piece.gain_s / piece.memory, reverse=True):
        key, is_more = piece.request.key, best is None or piece.gain_s > best.gain_s
        if not piece.is_second and piece.num_blocks <= num_blocks and is_more:
            best = piece
        fits = key in chosen if piece.is_second else len(chosen) < num_slots
        if fits and piece.num_blocks <= num_left:
            num_left -= piece.num_blocks
            gain_s = piece.gain_s + (chosen[key].gain_s if piece.is_second else 0.0)
            chosen[key] = piece._replace(gain_s=gain_s)
    if best is not None and best.gain_s > sum(choice.gain_s for choice in chosen.values()):
        return [best]
    return [*chosen.values()]
