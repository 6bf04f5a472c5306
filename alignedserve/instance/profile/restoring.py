"""Measures how much longer an iteration takes for each token whose K and V are restored from kept inputs
(`ops/kept_inputs.py`).

Two requests of the same length decode in turn: one has KV, the other has inputs of all tokens, of which each of its
iterations restores K and V. The difference is what restoring takes.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from alignedserve.engine.engine import Engine
from alignedserve.engine.request import Request
from alignedserve.instance.profile.fit_copies import Restored, fit_restoring
from alignedserve.instance.profile.grid import MARGIN, Reach
from alignedserve.instance.profile.measure import Bench, reach_of
from alignedserve.timing.cost import CostModel

_SHORTEST, _STEP = 16, 4
# Of several steps the quickest counts; the first is left out.
_NUM_STEPS = 4
MAX_ROUNDS = 5


def measure_restoring(engine: Engine, cost: CostModel, budget_s: float) -> float:
    """Returns the seconds per token; 0 if the engine keeps no inputs. `cost` says how long the iterations will take: of
    those that would take longer than `budget_s` in all only the shortest are measured. `engine` must be idle, and is
    left idle."""
    if not engine.limits.can_keep_inputs:
        return 0.0
    bench, found = RestoringBench(engine), list[Restored]()
    lengths = [*lengths_within(reach_of(engine), cost, budget_s)]
    begun_s = time.perf_counter()
    for _ in range(MAX_ROUNDS):
        found += map(bench.restored, lengths)
        if time.perf_counter() - begun_s > budget_s:
            break
    return fit_restoring(found)


def lengths_within(reach: Reach, cost: CostModel, budget_s: float) -> Iterator[int]:
    """The numbers of tokens to restore, the smaller first. Their inputs are computed in one iteration, and there is
    memory for both requests."""
    longest = min(reach.max_chunk, reach.max_model_len - MARGIN, reach.num_kv_tokens // 2 - MARGIN)
    length, sum_s = min(_SHORTEST, longest), 0.0
    while length > 0:
        yield length
        next_length = min(length * _STEP, longest)
        if next_length == length:
            return
        length = next_length
        sum_s += cost.iteration([(0, length)], []) + 2 * (_NUM_STEPS + 1) * cost.iteration(
            [], [length], length
        )
        if sum_s > budget_s:
            return


class RestoringBench(Bench):
    def restored(self, num_tokens: int) -> Restored:
        kept = self._with_inputs(num_tokens)
        try:
            with self._decodes([num_tokens + 1]) as plain:
                restoring_s, plain_s = list[float](), list[float]()
                for _ in range(1 + _NUM_STEPS):
                    plain_s.append(self._run(plain))
                    restoring_s.append(self._run([(kept, 1)]))
        finally:
            self._release([kept])
        return Restored(num_tokens, min(restoring_s[1:]) - min(plain_s[1:]))

    def _with_inputs(self, num_tokens: int) -> Request:
        """Computes a prompt of which the inputs are kept, so that the request decodes."""
        request = self._request(num_tokens, 0, keeps_inputs=True)
        self._run([(request, num_tokens)])
        return request
