"""Fits the cost model of alignedserve/timing/cost.py to measured iterations. Pure.

The fit minimises relative errors, so short iterations count as much as long ones. Attention is assumed to be balanced:
only the sum of the lengths counts, each up to the window if all layers have one.

    decodes   max over the lines (fixed_s + token_s * n) + experts_s * the share of experts that n tokens hit
              + decode_attention_s * sum of lengths + decode_far_s * the part of that sum beyond num_near_tokens
    chunks    prefill_fixed_s + prefill_token_s * c + max(prefill_attention_s * (2bc + c^2), reading all KV)
              + prefill_context_s * (b + c) + experts_s * the share of experts that c tokens hit

Both maxima are linear once their larger side is known. So it fits, determines the larger sides, and fits again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from alignedserve.instance.profile.points import Measured
from alignedserve.timing.cost import (
    FREE_COPIES,
    CostModel,
    ExpertCounts,
    LinearCost,
    chunk_pairs,
    chunk_reads,
    seen_lengths,
)

Numbers = NDArray[np.float64]

HELD_OUT = 5
_MAX_LINES = 3
_NUM_ROUNDS = 30
_LEAST_POINTS_OF_FAR = 20
# The smallest cost. It replaces costs that are indistinguishable from zero.
_LEAST_S = 1e-12


@dataclass(frozen=True)
class DecodeFit:
    lines: list[LinearCost]
    attention_s: float
    far_s: float
    num_near: int
    experts_s: float

    def seconds(self, count: Numbers, total: Numbers, hit: Numbers) -> Numbers:
        far = np.maximum(total - self.num_near, 0)
        kv_s = self.attention_s * total + self.far_s * far
        return _longest(self.lines, count) + kv_s + self.experts_s * hit


@dataclass(frozen=True)
class ChunkFit:
    fixed_s: float
    token_s: float
    pair_s: float
    context_s: float


@dataclass(frozen=True)
class Error:
    """The relative errors of one kind of point."""

    median: float
    p95: float
    num_points: int


def fit(
    points: Sequence[Measured],
    kv_bytes_per_token: int,
    num_kv_tokens: int,
    source: str,
    experts: ExpertCounts | None = None,
    window: int = 0,
) -> CostModel:
    """Returns a model of iterations only; copies are free in it (`fit_copies.py` fits those). `experts`: those of a
    mixture. `window`: see CostModel."""
    decode = fit_decodes([each for each in points if each.point.kind == "decode"], experts, window)
    chunks = [each for each in points if each.point.kind == "chunk"]
    chunk = fit_chunks(chunks, decode.attention_s, decode.experts_s * _hit_shares(chunks, experts), window)
    return CostModel(
        source=source,
        kv_bytes_per_token=kv_bytes_per_token,
        num_kv_tokens=num_kv_tokens,
        prefill_fixed_s=chunk.fixed_s,
        prefill_token_s=max(chunk.token_s, _LEAST_S),
        prefill_attention_s=chunk.pair_s,
        prefill_context_s=chunk.context_s,
        decode_lines=decode.lines,
        decode_attention_s=decode.attention_s,
        decode_far_s=decode.far_s,
        num_near_tokens=decode.num_near,
        num_filling=1.0,
        channels=FREE_COPIES,
        window=window,
        expert_counts=experts,
        experts_s=decode.experts_s,
    )


def fit_held_out(
    points: Sequence[Measured],
    kv_bytes_per_token: int,
    num_kv_tokens: int,
    source: str,
    experts: ExpertCounts | None = None,
    window: int = 0,
) -> tuple[CostModel, dict[str, Error]]:
    """Fits all points. Also returns, by kind, the errors of a fit of most points on the others."""
    kept, held_out = split(points)
    without = fit(kept, kv_bytes_per_token, num_kv_tokens, source, experts, window)
    of_all = fit(points, kv_bytes_per_token, num_kv_tokens, source, experts, window)
    return of_all, errors(without, held_out)


def split(points: Sequence[Measured]) -> tuple[list[Measured], list[Measured]]:
    """Holds out every fifth point of each kind."""
    kept, held_out = [], []
    for kind in ("decode", "chunk", "both"):
        some = [each for each in points if each.point.kind == kind]
        held_out += some[HELD_OUT // 2 :: HELD_OUT]
        kept += [each for index, each in enumerate(some) if index % HELD_OUT != HELD_OUT // 2]
    return kept, held_out


def errors(model: CostModel, points: Sequence[Measured]) -> dict[str, Error]:
    found = {}
    for kind in ("decode", "chunk", "both"):
        each = [relative_error(model, one) for one in points if one.point.kind == kind]
        if each:
            found[kind] = Error(float(np.median(each)), float(np.quantile(each, 0.95)), len(each))
    return found


def relative_error(model: CostModel, measured: Measured) -> float:
    point = measured.point
    return abs(model.iteration(point.chunks, point.lengths) / measured.seconds - 1)


# ---- decodes ---------------------------------------------------------------------------------------------------------


def fit_decodes(
    points: Sequence[Measured], experts: ExpertCounts | None = None, window: int = 0
) -> DecodeFit:
    if not points:
        raise ValueError("no decodes to fit")
    count = np.array([len(each.point.lengths) for each in points], float)
    total = np.array([sum(seen_lengths(each.point.lengths, window)) for each in points], float)
    seconds, hit = _seconds(points), _hit_shares(points, experts)

    def error(found: DecodeFit) -> float:
        return float(np.mean(np.abs(found.seconds(count, total, hit) / seconds - 1)))

    starts = [np.searchsorted(crossings, count, "right") for crossings in _crossings(count)]
    return min(
        (_fit_lines(count, total, hit, seconds, start, near) for near in _nears(total) for start in starts),
        key=error,
    )


def _crossings(count: Numbers) -> list[tuple[float, ...]]:
    """Returns the sets of batch sizes at which the next line may begin, as starting points of the fit. The first and
    the last line have at least two batch sizes."""
    sizes = np.unique(count)
    inner = [float(size) for size in sizes[2:-1]] if len(sizes) > 3 else []
    return [each for number in range(_MAX_LINES) for each in combinations(inner, number)]


def _nears(total: Numbers) -> list[int]:
    """Returns candidates for the number of near KV tokens. At least a quarter of the points is on either side. With few
    points, all KV is near."""
    if len(total) < _LEAST_POINTS_OF_FAR:
        return [int(total.max())]
    low, high = np.quantile(total, [0.25, 0.75])
    return [int(total.max()), *(1 << power for power in range(32) if low <= 1 << power <= high)]


def _fit_lines(
    count: Numbers, total: Numbers, hit: Numbers, seconds: Numbers, which: NDArray[np.intp], num_near: int
) -> DecodeFit:
    lines, attention_s, far_s, experts_s = list[LinearCost](), 0.0, 0.0, 0.0
    far = np.maximum(total - num_near, 0)
    for _ in range(_NUM_ROUNDS):
        kinds = np.unique(which)
        of_lines = [(which == kind) * factor for kind in kinds for factor in (np.ones_like(count), count)]
        columns = np.stack([*of_lines, total, far, hit], axis=1)
        *found, attention_s, far_s, experts_s = least_squares(columns, seconds).tolist()
        lines = [LinearCost(*found[index : index + 2]) for index in range(0, len(found), 2)]
        again = np.argmax([line.fixed_s + line.token_s * count for line in lines], axis=0)
        if (again == which).all():
            break
        which = again
    return DecodeFit(lines, max(attention_s, _LEAST_S), far_s, num_near, experts_s)


def _longest(lines: Sequence[LinearCost], count: Numbers) -> Numbers:
    longest: Numbers = np.max([line.fixed_s + line.token_s * count for line in lines], axis=0)
    return longest


# ---- chunks ----------------------------------------------------------------------------------------------------------


def fit_chunks(
    points: Sequence[Measured], attention_s: float, experts_s: Numbers | float = 0.0, window: int = 0
) -> ChunkFit:
    """Fits points with one chunk each. `experts_s`: the seconds for reading each chunk's experts."""
    if not points:
        raise ValueError("no chunks to fit")
    chunks = [each.point.chunks[0] for each in points]
    count = np.array([num_tokens for _, num_tokens in chunks], float)
    pairs = np.array([chunk_pairs(*chunk, window) for chunk in chunks], float)
    reads = np.array([chunk_reads(*chunk, window) for chunk in chunks], float)
    read_s = attention_s * reads
    seconds, found = _seconds(points), np.zeros(4)
    is_reading = np.zeros(len(points), bool)
    for _ in range(_NUM_ROUNDS):
        columns = [np.ones_like(count), count, np.where(is_reading, 0.0, pairs), reads]
        offset = np.where(is_reading, read_s, 0.0) + experts_s
        found = least_squares(np.stack(columns, axis=1), seconds, offset)
        again = read_s > found[2] * pairs
        if (again == is_reading).all():
            break
        is_reading = again
    return ChunkFit(*found.tolist())


def least_squares(columns: Numbers, seconds: Numbers, offset: Numbers | float = 0.0) -> Numbers:
    """Returns the coefficients that minimise relative squared errors. None is negative: the most negative one is
    dropped, and the rest fitted again."""
    scaled, target = columns / seconds[:, None], (seconds - offset) / seconds
    # Columns are scaled to norm one, so that microseconds per token and milliseconds are solved equally well.
    norms = np.linalg.norm(scaled, axis=0)
    kept = [index for index in range(columns.shape[1]) if norms[index] > 0]
    while kept:
        found = np.linalg.lstsq(scaled[:, kept] / norms[kept], target, rcond=None)[0]
        if found.min() >= 0:
            break
        del kept[int(found.argmin())]
    full = np.zeros(columns.shape[1])
    if kept:
        full[kept] = found / norms[kept]
    return full


def _hit_shares(points: Sequence[Measured], experts: ExpertCounts | None) -> Numbers:
    """Returns zeros if there are no experts."""
    return np.array([experts.hit_share(each.point.num_computed) if experts else 0.0 for each in points])


def _seconds(points: Sequence[Measured]) -> Numbers:
    return np.array([each.seconds for each in points], float)
