"""Measures how much less time decodes take if they share KV, where kernels read a shared block once for all of them.

Two batches of equal lengths decode in turn. In one, each request has KV of its own. In the other, all share everything
but the last tokens. The difference, relative to the time in which the shared tokens would have been read once more for
each request, is `CostModel.shared_saving`. Products, which every request needs, are what is not saved.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from alignedserve.engine.engine import Engine
from alignedserve.engine.request import Request, Work
from alignedserve.instance.profile.grid import MARGIN
from alignedserve.instance.profile.measure import LONG_S, Bench, reach_of
from alignedserve.timing.cost import CostModel

# Requests that share, so that most reading is saved.
_NUM_REQUESTS = 8
# Shared tokens with which attention takes much of an iteration, and the fewest that show a difference.
_LONGEST, _SHORTEST = 2048, 256
# Steps per round; the quickest counts, except for the first. There are fewer if they are long.
_NUM_STEPS = 4
MAX_ROUNDS = 5


def measure_sharing(engine: Engine, cost: CostModel, budget_s: float) -> float:
    """Returns the share that is saved; 0 if nothing is, or if too little fits in memory. `engine` must be idle, and is
    left idle. Takes about `budget_s` seconds, but measures once in any case."""
    reach, block_size = reach_of(engine), engine.cache.format.block_size
    num_requests = min(_NUM_REQUESTS, reach.max_num_seqs, reach.max_chunk)
    # Behind the shared tokens, each request needs room for those of all steps.
    num_own = -(-(2 + _NUM_STEPS) // block_size)
    num_fitting = (engine.limits.num_blocks // max(num_requests, 1) - num_own) * block_size
    longest = min(_LONGEST, reach.max_model_len - MARGIN, num_fitting)
    has_window = engine.window or engine.span.window or engine.span.num_groups > 1
    if has_window or num_requests < 2 or longest < block_size:
        return 0.0
    while longest >= 2 * _SHORTEST and 4 * cost.iteration([], [longest] * num_requests) > budget_s:
        longest //= 2
    num_shared = longest // block_size * block_size
    bench, found, begun_s = SharingBench(engine), list[float](), time.perf_counter()
    while not found or (len(found) < MAX_ROUNDS and time.perf_counter() - begun_s < budget_s):
        found.append(bench.saved_s(num_requests, num_shared))
    reading_s = cost.reading_s(num_requests * num_shared) - cost.reading_s(num_shared)
    return min(max(statistics.median(found) / reading_s, 0.0), 1.0)


class SharingBench(Bench):
    def saved_s(self, num_requests: int, num_shared: int) -> float:
        """Returns the seconds by which a step is shorter if the requests share their first tokens."""
        lengths = [num_shared + 1] * num_requests
        with self._decodes(lengths) as alone:
            alone_s = self._quickest(alone)
        with self._sharing(num_requests, num_shared) as together:
            return alone_s - self._quickest(together)

    def _quickest(self, work: Work) -> float:
        found = [self._run(work)]
        while len(found) < 2 or (len(found) <= _NUM_STEPS and sum(found) < LONG_S):
            found.append(self._run(work))
        return min(found[1:])

    @contextmanager
    def _sharing(self, num_requests: int, num_shared: int) -> Iterator[Work]:
        hashes = [
            number.to_bytes(32) for number in range(num_shared // self._engine.engine.format.block_size)
        ]
        requests = [self._request(num_shared, num_shared, self._tokens[:1])]
        try:
            self._engine.memory.publish(requests[0].held, 0, hashes)
            requests += [self._beside(hashes, num_shared) for _ in range(num_requests - 1)]
            yield [(request, 1) for request in requests]
        finally:
            self._engine.memory.forget_all()
            self._release(requests)

    def _beside(self, hashes: Sequence[bytes], num_shared: int) -> Request:
        return self._request(num_shared, num_shared, self._tokens[:1], hashes=hashes)
