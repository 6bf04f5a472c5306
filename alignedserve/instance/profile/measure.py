"""Measures iterations on an engine, as instances run them.

A machine that does other work too is slower at times, for seconds or for a moment: long iterations suffer from that,
and short ones slip through. So all points are measured again and again, in another order each time. Before and after
each of them a reference is measured, an iteration which takes about as long and is always the same. A point's time
counts relative to those of the reference around it; the median over all rounds is taken.
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
from alignedserve.engine.request import Request, Work
from alignedserve.instance.profile.grid import MARGIN, Reach, size
from alignedserve.instance.profile.points import Measured, Point
from alignedserve.instance.requests import coming_news, complete
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import BlockId, RequestId

# Each time that a point's turn comes, the best of so many steps counts; fewer are made when they take long.
_MAX_STEPS = 3
LONG_S = 0.05
# A point which would take more than this share of the whole budget is left out.
_LARGEST_SHARE = 0.02
# Points which are not measured by this share of the budget aren't measured at all.
_FIRST_ROUND_SHARE = 0.7
# At least so many points of each kind are measured, however long they take: without them there is no fit.
_NUM_NEEDED = 3
# It is small, so that no logit overflows in float16; and not zero, because zeros are quicker on a GPU.
_KV_DEVIATION = 0.1
# The number of prompt tokens of each reference.
_REFERENCES = (8, 32, 128, 512)
# This share of a reference's times is taken to be from an undisturbed machine.
_QUICK_SHARE = 0.1
_PARAMS = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)


def reach_of(engine: Engine) -> Reach:
    limits, block_size = engine.limits, engine.cache.format.block_size
    return Reach(
        max_num_seqs=limits.max_num_seqs,
        max_chunk=min(limits.max_prefill_chunk, engine.max_model_len),
        max_model_len=engine.max_model_len,
        num_kv_tokens=engine.num_blocks // engine.span.num_groups * block_size,
    )


def measure(
    engine: Engine,
    points: Sequence[Point],
    budget_s: float,
    max_rounds: int,
    progress: Callable[[float], None] = lambda share: None,
) -> list[Measured]:
    """Measures `points`, given the smaller first; those which take too long are left out. `engine` must be idle, and
    is left idle. `progress` is called with the share that is done."""
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
    # The seconds per unit of size, as the latest point of each kind took them.
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
        """`references` are given the smaller first; those which may take longer than `longest_s` are left out, except
        the first."""
        self._bench = bench
        # All the seconds that were measured of each reference.
        self._beside: dict[Point, list[float]] = {}
        per_token_s = 0.0
        for point in references:
            if per_token_s * point.num_computed <= longest_s:
                self._beside[point] = [bench.seconds(point)]
                per_token_s = self._beside[point][0] / point.num_computed
        # Of each point its reference, and the ratios of its seconds to the reference's around it.
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
        """The point's seconds on a machine that is nearly as quick as it ever was."""
        reference, ratios = self._visits[point]
        return statistics.median(ratios) * float(np.quantile(self._beside[reference], _QUICK_SHARE))

    def _reference_of(self, seconds: float) -> Point:
        return min(self._beside, key=lambda point: abs(math.log(self._beside[point][0] / seconds)))

    def _measure(self, reference: Point) -> float:
        seconds = self._bench.seconds(reference)
        self._beside[reference].append(seconds)
        return seconds


class Bench:
    """Runs iterations of requests whose KV is noise, as if it had been computed elsewhere."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        tokens = np.random.default_rng(0).integers(engine.vocabulary.size, size=engine.max_model_len)
        self._tokens: list[int] = tokens.tolist()
        shape = (*engine.format.shape[:-1], engine.format.head_dim)
        self._noise = torch.randn(shape, generator=torch.Generator().manual_seed(0)) * _KV_DEVIATION
        self._noisy: set[BlockId] = set()
        self._num_requests = 0

    def has_room(self, point: Point) -> bool:
        ends = [length + _MAX_STEPS for length in point.lengths]
        ends += [before + count for before, count in point.chunks]
        return sum(self._engine.span.num_held(0, end) for end in ends) <= self._engine.num_free_blocks

    def seconds(self, point: Point) -> float:
        """The least seconds of several steps, after one that is not counted."""
        with self._decodes(point.lengths) as decodes:
            found = [self._step(decodes, point.chunks)]
            while len(found) < 2 or (len(found) <= _MAX_STEPS and sum(found) < LONG_S):
                found.append(self._step(decodes, point.chunks))
        return min(found[1:])

    @contextmanager
    def _decodes(self, lengths: Sequence[int]) -> Iterator[Work]:
        # Tokens differ: of a mixture, equal ones would all go through the same few experts.
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
        begun_s = time.perf_counter()
        iteration = self._engine.launch(work)
        news = coming_news(iteration.requests)
        for one, output in zip(news, self._engine.finish(iteration), strict=True):
            complete(one, output)
        return time.perf_counter() - begun_s

    def _request(
        self, num_prompt: int, num_computed: int, output: Sequence[int] = (), keeps_inputs: bool = False
    ) -> Request:
        self._num_requests += 1
        name = RequestId(str(self._num_requests))
        prompt = self._tokens[: max(num_prompt, 1)]
        request = self._engine.adopt(
            name, prompt, _PARAMS, 0, output, num_computed, keeps_inputs=keeps_inputs
        )
        if request is None:
            raise RuntimeError(
                f"no room for {num_prompt} tokens: {self._engine.num_free_blocks} blocks are free"
            )
        self._fill(self._engine.blocks_of(request))
        self._engine.join(request)
        return request

    def _fill(self, blocks: Sequence[BlockId]) -> None:
        new = [block for block in blocks if block not in self._noisy]
        if new:
            self._engine.cache.fill(new, self._noise)
            self._noisy.update(new)

    def _release(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self._engine.release(request)
