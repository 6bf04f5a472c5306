"""Measures iterations over a grid for `cost_fit`: prefill chunks, decode batches, and both together.

A point is {chunks: [[tokens before, tokens computed], ...], lengths: [one per decode], seconds, repeats}. Seconds is
the median from the call to tokens on the host. A chunk is the last one of its prompt, so it produces a token.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from alignedserve.engine.engine import Engine
from alignedserve.engine.request import NewRequest
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestId
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.decoding import Decoding, engine_for
from benchmarks.gpu.models import config_of
from benchmarks.gpu.record import Row

MODELS = ("llama-3.1-8b", "opt-13b")
CHUNKS = (128, 256, 512, 1024, 2048, 4096)
BEFORE = (0, 2048, 8192, 16384)
BATCHES = (1, 4, 16, 32, 64, 96, 128, 192, 256)
LENGTHS = (128, 512, 1024, 2048, 4096, 8192)
# Tokens of KV that fit beside the weights, leaving room for graphs and activations.
MAX_KV_TOKENS = {"llama-3.1-8b": 600_000, "opt-13b": 110_000}
CHUNK_REPEATS, DECODE_REPEATS, WARM_UPS = 4, 6, 2
MAX_STEPS = 32


@dataclass(frozen=True)
class Point:
    chunks: tuple[tuple[int, int], ...]
    lengths: tuple[int, ...]

    @property
    def num_kv_tokens(self) -> int:
        return sum(before + count for before, count in self.chunks) + sum(self.lengths)


def points(max_len: int, max_kv_tokens: int, seed: int = 0) -> list[Point]:
    """Returns the points in shuffled order, so a run that ends early has measured some of everything."""
    found = [Point((chunk,), ()) for chunk in chunk_grid(max_len)]
    found += [Point((), (length,) * batch) for batch in BATCHES for length in LENGTHS]
    found += list(_mixed(seed, max_len))
    found = [
        point
        for point in found
        if point.num_kv_tokens <= max_kv_tokens and max(point.lengths, default=0) + MAX_STEPS <= max_len
    ]
    random.Random(seed).shuffle(found)
    return found


def chunk_grid(max_len: int) -> list[tuple[int, int]]:
    return [(before, count) for before in BEFORE for count in CHUNKS if before + count + MAX_STEPS <= max_len]


def _mixed(seed: int, max_len: int) -> Iterator[Point]:
    """Yields batches of unequal lengths, and decodes beside a chunk."""
    choose = random.Random(seed)
    for batch in (8, 32, 64, 128, 256):
        for _ in range(3):
            lengths = (round(256 * choose.lognormvariate(0, 1.0)) for _ in range(batch))
            yield Point((), tuple(min(max(length, 16), max_len - MAX_STEPS) for length in lengths))
    for batch in (16, 64, 128):
        for chunk in (256, 1024):
            yield Point(((0, chunk),), (512,) * batch)


def run(bench: Bench) -> None:
    models = bench.models(*MODELS)
    for index, model in enumerate(models):
        # The remaining time is divided equally among the remaining models.
        until = time.monotonic() + bench.seconds_left / (len(models) - index)
        if not bench.has_time(model, bench.pick(20, 1)):
            continue
        max_len = min(config_of(model, bench).max_position, bench.pick(32768, 512))
        grid = points(max_len, bench.pick(MAX_KV_TOKENS[model], 4000))
        try:
            with engine_for(bench, model, _batches(grid), MAX_STEPS, max_num_batched_tokens=8192) as built:
                bench.case(model, measure, built.engine, model, grid, until)
        except Exception:
            bench.fail(model)


def _batches(grid: Sequence[Point]) -> list[list[int]]:
    """Returns the lengths as the engine sees them: a chunk is a request too."""
    return [[before + count for before, count in point.chunks] + list(point.lengths) for point in grid]


def measure(engine: Engine, model: str, grid: Sequence[Point], until: float) -> Row:
    rows: list[dict[str, Any]] = []
    for point in grid:
        if time.monotonic() > until:
            break
        seconds = point_seconds(engine, point)
        rows.append(
            {
                "chunks": [list(chunk) for chunk in point.chunks],
                "lengths": list(point.lengths),
                "seconds": statistics.median(seconds),
                "repeats": len(seconds),
            }
        )
    return {
        "model": model,
        "points": rows,
        "kv_bytes_per_token": engine.cache.format.block_bytes // engine.cache.format.block_size,
        "summary": f"{len(rows)} of {len(grid)} points",
    }


def point_seconds(engine: Engine, point: Point) -> list[float]:
    if not point.chunks:
        with Decoding(engine, point.lengths, MAX_STEPS) as batch:
            return batch.wall_seconds(DECODE_REPEATS, WARM_UPS)
    with Decoding(engine, point.lengths, MAX_STEPS) as batch:
        return [_with_chunks(engine, point, batch) for _ in range(WARM_UPS + CHUNK_REPEATS)][WARM_UPS:]


def _with_chunks(engine: Engine, point: Point, batch: Decoding) -> float:
    tokens, vocab_size = np.random.default_rng(0), engine.vocabulary.size
    chunks = []
    for index, (before, count) in enumerate(point.chunks):
        prompt = tokens.integers(vocab_size, size=before + count).tolist()
        params = SamplingParams(temperature=0, max_tokens=MAX_STEPS, ignore_eos=True)
        new = NewRequest(RequestId(f"chunk{index}"), prompt, params, seed=0, num_computed=before)
        request = batch.direct.begin(new)
        chunks.append((request, count))
    begin = time.perf_counter()
    engine.execute([*batch.work, *chunks])
    seconds = time.perf_counter() - begin
    for request, _ in chunks:
        batch.direct.release(request)
    return seconds
