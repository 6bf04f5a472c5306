"""What simulated gateways know about a request's length when they submit it: nothing, all, or an estimate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from alignedserve.protocol.messages import Request
from alignedserve.sim.model import num_output_tokens

# Returns the total number of output tokens of a request; 0: unknown.
Foresee = Callable[[Request], int]

# The length predictor's mean relative errors, from benchmarks/results/lengths.md.
DEMO_ERROR, GSM8K_ERROR = 0.478, 0.267


def nothing(request: Request) -> int:
    return 0


def oracle(max_model_len: int) -> Foresee:
    return partial(num_output_tokens, max_model_len=max_model_len)


@dataclass(frozen=True)
class Roughly:
    """The true length times a log-normal factor, too long as often as too short. Always the same for a request."""

    max_model_len: int
    # The mean of |predicted - true| / true.
    relative_error: float = DEMO_ERROR
    _sigma: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_sigma", sigma_for(self.relative_error))

    def __call__(self, request: Request) -> int:
        factor = random.Random(request.seed).lognormvariate(0.0, self._sigma)
        return max(1, round(factor * num_output_tokens(request, self.max_model_len)))


def sigma_for(relative_error: float) -> float:
    """Returns the sigma for which exp(sigma * Z), with Z normal, has this mean distance from 1."""
    if not 0 <= relative_error <= 10:
        raise ValueError(f"relative_error={relative_error}: must be from 0 to 10")
    low, high = 0.0, 4.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _mean_distance(middle) < relative_error else (low, middle)
    return low


def _mean_distance(sigma: float) -> float:
    return math.exp(sigma**2 / 2) * math.erf(sigma / math.sqrt(2))
