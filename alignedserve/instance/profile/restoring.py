"""Measures how much longer an iteration takes per token with K and V restored from kept inputs (`ops/kept_inputs.py`).

Two requests of equal length decode in turn. One has KV. The other has the inputs of all tokens, and each of its
iterations restores all their K and V. The difference is the cost of restoring: fixed_s + token_s * tokens. The cost
model has no term for the fixed seconds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec

from alignedserve.engine.engine import Engine
from alignedserve.engine.request import Request
from alignedserve.instance.profile.fit_copies import LEAST_S, fit_line
from alignedserve.instance.profile.grid import MARGIN, Reach
from alignedserve.instance.profile.measure import LONG_S, Bench, reach_of
from alignedserve.kv.layout import INPUTS
from alignedserve.timing.cost import CostModel

_SHORTEST, _STEP = 16, 4
# Steps per length; the quickest counts, except for the first. There are fewer if they are long.
_NUM_STEPS = 4
MAX_ROUNDS = 5
# The blocks of two requests, one of which needs another block after its first token.
_LEAST_BLOCKS = 4
# The cost of restoring a token if it is indistinguishable from zero.
_LEAST_TOKEN_S = 1e-12


@dataclass(frozen=True)
class Restored:
    num_tokens: int
    # Extra time over the same iteration without restoring.
    seconds: float


def with_restoring(cost: CostModel, engine: Engine, budget_s: float) -> CostModel:
    """Returns the cost model with the measured cost, if the engine keeps inputs."""
    token_s = measure_restoring(engine, cost, budget_s)
    return msgspec.structs.replace(cost, restored_token_s=token_s) if token_s else cost


def lacks_restoring(cost: CostModel, engine: Engine) -> bool:
    """Whether the cost of restoring is not known, and could be. It is unknown to profiles of earlier versions, which
    have no copies either."""
    return engine.limits.can_keep_inputs and not (cost.has_free_copies or cost.restored_token_s)


def measure_restoring(engine: Engine, cost: CostModel, budget_s: float) -> float:
    """Returns the seconds per token; 0 if the engine keeps no inputs. `cost` predicts the iterations, so that they fit
    in `budget_s`; it also provides the result if two requests don't fit in memory. `engine` must be idle, and is left
    idle."""
    limits, reach = engine.limits, reach_of(engine)
    if not limits.can_keep_inputs:
        return 0.0
    num_blocks = reach.num_kv_tokens // engine.cache.format.block_size
    if min(limits.max_num_seqs, limits.max_num_batched_tokens) < 2 or num_blocks < _LEAST_BLOCKS:
        return cost.restoring(1)
    bench, found = RestoringBench(engine), list[Restored]()
    lengths = lengths_within(reach, cost, budget_s)
    begun_s = time.perf_counter()
    for _ in range(MAX_ROUNDS):
        found += map(bench.restored, lengths)
        if time.perf_counter() - begun_s > budget_s:
            break
    return fit_restoring(found)


def fit_restoring(restored: Sequence[Restored]) -> float:
    """Returns the seconds per token, above zero. For each number of tokens the median counts, because either of the two
    iterations may have been disturbed."""
    by_count: dict[int, list[float]] = {}
    for each in restored:
        by_count.setdefault(each.num_tokens, []).append(each.seconds)
    medians = {count: statistics.median(some) for count, some in by_count.items()}
    longer_s = {count: seconds for count, seconds in medians.items() if seconds > LEAST_S}
    if not longer_s:
        return _LEAST_TOKEN_S
    token_s = fit_line(longer_s)[1] if len(longer_s) > 1 else 0.0
    most = max(longer_s)
    return max(token_s or longer_s[most] / most, _LEAST_TOKEN_S)


def lengths_within(reach: Reach, cost: CostModel, budget_s: float) -> list[int]:
    """Returns two numbers of tokens to restore, for fitting a line. One is small. The other is the largest that leaves
    half of the time to the small one and to repetitions. Inputs are computed in one iteration, and both requests fit in
    memory."""
    longest = min(reach.max_chunk, reach.max_model_len - MARGIN, reach.num_kv_tokens // 2 - MARGIN)
    if longest <= 0:
        return []
    small = min(_SHORTEST, longest)
    # Even on the slowest model, this length is measured.
    large = min(small * _STEP, longest)
    while large < longest and _seconds(cost, next_one := min(large * _STEP, longest)) <= budget_s / 2:
        large = next_one
    return sorted({small, large})


def _seconds(cost: CostModel, length: int) -> float:
    """Predicted seconds to measure one length once."""
    return cost.iteration([(0, length)], []) + 2 * (1 + _NUM_STEPS) * cost.iteration([], [length], length)


class RestoringBench(Bench):
    def restored(self, num_tokens: int) -> Restored:
        kept = self._with_inputs(num_tokens)
        try:
            with self._decodes([num_tokens + 1]) as plain:
                restoring_s, plain_s = list[float](), list[float]()
                while len(plain_s) < 2 or (len(plain_s) <= _NUM_STEPS and sum(plain_s) < LONG_S):
                    plain_s.append(self._run(plain))
                    restoring_s.append(self._run([(kept, 1)]))
        finally:
            self._release([kept])
        return Restored(num_tokens, min(restoring_s[1:]) - min(plain_s[1:]))

    def _with_inputs(self, num_tokens: int) -> Request:
        """Computes a prompt with kept inputs, so that the request then decodes."""
        request = self._request(num_tokens, 0, layout=INPUTS)
        self._run([(request, num_tokens)])
        return request
