"""Fits the cost model's terms for copies of KV: a copy takes latency_s + bytes / bytes_per_s. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from alignedserve.instance.profile.fit import least_squares
from alignedserve.timing.cost import CopyChannel

# The resolution of a clock, in seconds.
LEAST_S = 1e-9
# No memory copies more than 1e15 bytes per second.
_LEAST_BYTE_S = 1e-15


@dataclass(frozen=True)
class Copied:
    num_bytes: int
    seconds: float


def fit_channel(copies: Sequence[Copied]) -> CopyChannel:
    """Fits copies of a few sizes. For each size the quickest one counts, because it was disturbed least. If there is
    only one size, or larger copies took no longer, the rate is the largest size's and the latency is zero."""
    seconds: dict[int, float] = {}
    for each in copies:
        seconds[each.num_bytes] = min(seconds.get(each.num_bytes, math.inf), max(each.seconds, LEAST_S))
    if not seconds:
        raise ValueError("no copies to fit")
    latency_s, byte_s = 0.0, 0.0
    if len(seconds) > 1:
        latency_s, byte_s = fit_line(seconds)
    if byte_s < _LEAST_BYTE_S:
        largest = max(seconds)
        return CopyChannel(0.0, largest / seconds[largest])
    return CopyChannel(latency_s, 1 / byte_s)


def fit_line(seconds: Mapping[int, float]) -> tuple[float, float]:
    """Returns the fixed seconds and those per unit of size."""
    sizes, took_s = np.array([*seconds], float), np.array([*seconds.values()])
    fixed_s, unit_s = least_squares(np.stack([np.ones_like(sizes), sizes], axis=1), took_s).tolist()
    return fixed_s, unit_s
