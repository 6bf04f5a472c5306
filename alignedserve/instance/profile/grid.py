"""Chooses the iterations to measure, within the limits of the instance. Pure."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import msgspec

from alignedserve.instance.profile.points import Point

# Tokens by which a request may grow while it is measured.
MARGIN = 8
# Limit on KV tokens per point. More would only take longer to set up.
_MAX_KV_TOKENS = 130_000
_SHORTEST = 16


class Reach(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The largest iterations that an instance can compute."""

    max_num_seqs: int
    # Tokens of one prompt in one iteration.
    max_chunk: int
    max_model_len: int
    num_kv_tokens: int

    def covers(self, other: Reach) -> bool:
        """Whether this reach includes the other. KV tokens are ignored, because time is linear in them."""
        return (
            self.max_num_seqs >= other.max_num_seqs
            and self.max_chunk >= other.max_chunk
            and self.max_model_len >= other.max_model_len
        )


def grid(reach: Reach, is_brief: bool = False) -> list[Point]:
    """Returns points of every kind, smaller ones first."""
    points = [
        *_even(reach, is_brief),
        *_chunks(reach, is_brief),
        *_uneven(reach, is_brief),
        *_mixed(reach, is_brief),
    ]
    fitting = {point: None for point in points if _fits(point, reach)}
    return sorted(fitting, key=size)


def size(point: Point) -> float:
    """Approximate work of the point, in tokens."""
    attended = sum(count * (2 * before + count) for before, count in point.chunks)
    return point.num_computed + (sum(point.lengths) + attended) / 1000


def _even(reach: Reach, is_brief: bool) -> Iterator[Point]:
    for batch in _ladder(1, reach.max_num_seqs, 4 if is_brief else 2):
        for length in _ladder(_SHORTEST, reach.max_model_len - MARGIN, 32 if is_brief else 4):
            yield Point(lengths=(length,) * batch)


def _chunks(reach: Reach, is_brief: bool) -> Iterator[Point]:
    befores = [512] if is_brief else _ladder(128, reach.max_model_len, 4)
    for count in _ladder(1, reach.max_chunk, 4 if is_brief else 2):
        for before in (0, *befores):
            yield Point(chunks=((before, count),))


def _uneven(reach: Reach, is_brief: bool) -> Iterator[Point]:
    """Yields batches with varied lengths, and batches with one much longer request."""
    choose = random.Random(0)
    longest = reach.max_model_len - MARGIN
    for batch in (32,) if is_brief else (8, 32, 128):
        lengths = [round(256 * choose.lognormvariate(0, 1)) for _ in range(batch)]
        yield Point(lengths=tuple(min(max(length, _SHORTEST), longest) for length in lengths))
        yield Point(lengths=(longest, *[min(64, longest)] * (batch - 1)))


def _mixed(reach: Reach, is_brief: bool) -> Iterator[Point]:
    """Yields decodes with a chunk of a prompt."""
    for batch in () if is_brief else (4, 32):
        for count in (32, 256):
            yield Point(
                ((0, min(count, reach.max_chunk)),), (min(256, reach.max_model_len - MARGIN),) * batch
            )


def _ladder(first: int, last: int, step: int) -> Sequence[int]:
    found = []
    while first < last:
        found.append(first)
        first *= step
    return [*found, last] if last > 0 else found


def _fits(point: Point, reach: Reach) -> bool:
    longest = max([*point.lengths, *(before + count for before, count in point.chunks)])
    return (
        0 < longest <= reach.max_model_len - MARGIN
        and len(point.lengths) + len(point.chunks) <= reach.max_num_seqs
        and (not point.chunks or point.num_computed <= reach.max_chunk)
        and point.num_kv_tokens <= min(reach.num_kv_tokens, _MAX_KV_TOKENS)
    )
