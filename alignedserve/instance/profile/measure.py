"""Measures iterations on an engine, as instances run them.

A machine with other work is slower at times, for seconds or for a moment. Long iterations suffer from that, and short
ones may not. So all points are measured several times, each time in another order. Before and after each point, a
reference is measured: a fixed iteration of similar duration. A point's time counts relative to the references around
it, and the median over all rounds is used.
"""

from __future__ import annotations

import itertools
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from alignedserve.engine.engine import Engine
from alignedserve.engine.request import NewRequest, Request, Work
from alignedserve.instance.direct import DirectEngine
from alignedserve.instance.profile.grid import MARGIN, Reach, size
from alignedserve.instance.profile.points import Measured, Point
from alignedserve.instance.requests import coming_news, complete
from alignedserve.kv.held import Held
from alignedserve.kv.layout import PLAIN, Layout
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import BlockId, RequestId

# Steps per visit of a point; the quickest counts. There are fewer if they are long.
_MAX_STEPS = 3
LONG_S = 0.05
# Points above this share of the whole budget are omitted.
_LARGEST_SHARE = 0.02
# Points that were not measured by this share of the budget are omitted.
_FIRST_ROUND_SHARE = 0.7
# Points of each kind that are measured however long they take, because the fit needs them.
_NUM_NEEDED = 3
# Standard deviation of the noise. It is small enough not to overflow logits in float16, and not zero, because zeros are
# faster on a GPU.
_KV_DEVIATION = 0.1
# Prompt tokens of each reference.
_REFERENCES = (8, 32, 128, 512)
# Quantile of a reference's times that represents an undisturbed machine.
_QUICK_SHARE = 0.1
_PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def reach_of(engine: Engine) -> Reach:
    limits, block_size = engine.limits, engine.cache.format.block_size
    return Reach(
        max_num_seqs=limits.max_num_seqs,
        max_chunk=min(limits.max_prefill_chunk, engine.max_model_len),
        max_model_len=engine.max_model_len,
        num_kv_tokens=engine.limits.num_blocks // engine.span.num_groups * block_size,
    )


def measure(
    engine: Engine,
    points: Sequence[Point],
    budget_s: float,
    max_rounds: int,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Measured]:
    """Measures `points`, which are given smaller first. Omits those that take too long. `engine` must be idle, and is
    left idle. `progress` is called with the completed share."""
    begun_s, largest_s = time.perf_counter(), _LARGEST_SHARE * budget_s
    bench = Bench(engine)
    log = VisitLog(bench, list(_references(reach_of(engine))), largest_s)
    points = [point for point in points if bench.has_room(point)]

    def visit(point: Point) -> float:
        log.visit(point)
        share = (time.perf_counter() - begun_s) / max(budget_s, 1e-9)
        progress(min(max(share, log.num_visits / (max_rounds * len(points))), 1.0))
        return share

    found = _first_round(points, visit, log, largest_s)
    for number in range(1, max_rounds):
        order = random.Random(number).sample(found, len(found))
        if any(visit(point) >= 1 for point in order):
            break
    progress(1.0)
    return [Measured(point, log.seconds(point)) for point in found]


def _references(reach: Reach) -> Iterator[Point]:
    for count in _REFERENCES:
        if count == _REFERENCES[0] or count <= min(reach.max_chunk, reach.max_model_len - MARGIN):
            yield Point(chunks=((0, min(count, reach.max_chunk)),))


def _first_round(
    points: Sequence[Point], visit: Callable[[Point], float], log: VisitLog, longest_s: float
) -> list[Point]:
    """Measures the points for which there is time, and returns them."""
    found: list[Point] = []
    share = 0.0
    # Seconds per unit of size for each kind, from its latest point.
    pace: dict[str, float] = {}
    for point in points:
        kind = point.kind
        is_needed = kind != "both" and sum(each.kind == kind for each in found) < _NUM_NEEDED
        is_quick = pace.get(kind, 0.0) * size(point) <= longest_s
        if is_needed or (is_quick and share < _FIRST_ROUND_SHARE):
            share = visit(point)
            pace[kind] = log.last_s / size(point)
            found.append(point)
    return found


class VisitLog:
    def __init__(self, bench: Bench, references: Sequence[Point], longest_s: float) -> None:
        """`references` are given smaller first. Those that may take longer than `longest_s` are omitted, except the
        first."""
        self._bench = bench
        # All measured seconds of each reference.
        self._beside: dict[Point, list[float]] = {}
        per_token_s = 0.0
        for point in references:
            if per_token_s * point.num_computed <= longest_s:
                self._beside[point] = [bench.seconds(point)]
                per_token_s = self._beside[point][0] / point.num_computed
        # For each point: its reference, and the ratios of its seconds to the reference's around it.
        self._visits: dict[Point, tuple[Point, list[float]]] = {}
        self.num_visits = 0
        self.last_s = 0.0

    def visit(self, point: Point) -> None:
        self.num_visits += 1
        if point not in self._visits:
            self._visits[point] = self._reference_of(self._bench.seconds(point)), []
        reference, ratios = self._visits[point]
        beside_s = self._measure(reference)
        self.last_s = self._bench.seconds(point)
        ratios.append(2 * self.last_s / (beside_s + self._measure(reference)))

    def seconds(self, point: Point) -> float:
        """Returns the point's seconds on an almost undisturbed machine."""
        reference, ratios = self._visits[point]
        return statistics.median(ratios) * float(np.quantile(self._beside[reference], _QUICK_SHARE))

    def _reference_of(self, seconds: float) -> Point:
        return min(self._beside, key=lambda point: abs(math.log(self._beside[point][0] / seconds)))

    def _measure(self, reference: Point) -> float:
        seconds = self._bench.seconds(reference)
        self._beside[reference].append(seconds)
        return seconds


class Bench:
    """Runs iterations on requests with noise as KV, as if it had been computed elsewhere."""

    def __init__(self, engine: Engine) -> None:
        self._engine = DirectEngine(engine)
        tokens = np.random.default_rng(0).integers(engine.vocabulary.size, size=engine.max_model_len)
        self._tokens: list[int] = tokens.tolist()
        shape = (*engine.format.shape[:-1], engine.format.head_dim)
        self._noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * _KV_DEVIATION
        self._noisy: set[BlockId] = set()
        self._num_requests = 0

    def has_room(self, point: Point) -> bool:
        ends = [length + _MAX_STEPS for length in point.lengths]
        ends += [before + count for before, count in point.chunks]
        memory = self._engine.memory
        return sum(memory.span.num_held(0, end) for end in ends) <= memory.num_free

    def seconds(self, point: Point) -> float:
        """Returns the least seconds of several steps, after one that is not counted."""
        with self._decodes(point.lengths) as decodes:
            found = [self._step(decodes, point.chunks)]
            while len(found) < 2 or (len(found) <= _MAX_STEPS and sum(found) < LONG_S):
                found.append(self._step(decodes, point.chunks))
        return min(found[1:])

    @contextmanager
    def _decodes(self, lengths: Sequence[int]) -> Iterator[Work]:
        # Equal tokens would all use the same experts of a mixture.
        tokens = itertools.cycle(self._tokens)
        requests = [
            self._request(length - 1, length - 1, [token])
            for length, token in zip(lengths, tokens, strict=False)
        ]
        try:
            yield [(request, 1) for request in requests]
        finally:
            self._release(requests)

    def _step(self, decodes: Work, chunks: Sequence[tuple[int, int]]) -> float:
        prompts = [self._request(before + count, before) for before, count in chunks]
        try:
            return self._run([*decodes, *zip(prompts, (count for _, count in chunks), strict=True)])
        finally:
            self._release(prompts)

    def _run(self, work: Work) -> float:
        self._engine.grow(work)
        engine, begun_s = self._engine.engine, time.perf_counter()
        iteration = engine.launch(work)
        news = coming_news(iteration.requests)
        for one, output in zip(news, engine.finish(iteration), strict=True):
            complete(one, output)
        return time.perf_counter() - begun_s

    def _request(
        self,
        num_prompt: int,
        num_computed: int,
        output: Sequence[int] = (),
        layout: Layout = PLAIN,
        hashes: Sequence[bytes] = (),
    ) -> Request:
        """`hashes`: those of its first blocks, which it shares."""
        self._num_requests += 1
        name = RequestId(str(self._num_requests))
        prompt = self._tokens[: max(num_prompt, 1)]
        new = NewRequest(name, prompt, _PARAMS, 0, output, num_computed, held=Held(layout=layout))
        request = self._engine.adopt(new, hashes)
        self._fill(self._engine.blocks_of(request))
        self._engine.join(request)
        return request

    def _fill(self, blocks: Sequence[BlockId]) -> None:
        new = [block for block in blocks if block not in self._noisy]
        if new:
            self._engine.engine.cache.fill(new, self._noise)
            self._noisy.update(new)

    def _release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.release(request)
