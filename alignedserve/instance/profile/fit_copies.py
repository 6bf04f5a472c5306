"""Fits the cost model's terms for copies of KV, and for restoring KV from kept inputs. Pure.

    a copy       latency_s + bytes / bytes_per_s
    restoring    fixed_s + token_s * tokens

The cost model has no term for the fixed seconds of restoring, which do not depend on the number of tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from alignedserve.instance.profile.fit import least_squares
from alignedserve.timing.cost import CopyChannel

# The resolution of a clock, in seconds.
_LEAST_S = 1e-9
# No memory copies more than 1e15 bytes per second.
_LEAST_BYTE_S = 1e-15
# The cost of restoring a token if it is indistinguishable from zero.
_LEAST_TOKEN_S = 1e-12


@dataclass(frozen=True)
class Copied:
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class Restored:
    num_tokens: int
    # Extra time over the same iteration without restoring.
    seconds: float


def fit_channel(copies: Sequence[Copied]) -> CopyChannel:
    """Fits copies of a few sizes. For each size the quickest one counts, because it was disturbed least. If there is
    only one size, or larger copies took no longer, the rate is the largest size's and the latency is zero."""
    seconds: dict[int, float] = {}
    for each in copies:
        seconds[each.num_bytes] = min(seconds.get(each.num_bytes, math.inf), max(each.seconds, _LEAST_S))
    if not seconds:
        raise ValueError("no copies to fit")
    latency_s, byte_s = 0.0, 0.0
    if len(seconds) > 1:
        latency_s, byte_s = _line(seconds)
    if byte_s < _LEAST_BYTE_S:
        largest = max(seconds)
        return CopyChannel(0.0, largest / seconds[largest])
    return CopyChannel(latency_s, 1 / byte_s)


def fit_restoring(restored: Sequence[Restored]) -> float:
    """Returns the seconds per token, above zero. For each number of tokens the median counts, because either of the two
    iterations may have been disturbed."""
    by_count: dict[int, list[float]] = {}
    for each in restored:
        by_count.setdefault(each.num_tokens, []).append(each.seconds)
    medians = {count: statistics.median(some) for count, some in by_count.items()}
    longer_s = {count: seconds for count, seconds in medians.items() if seconds > _LEAST_S}
    if not longer_s:
        return _LEAST_TOKEN_S
    token_s = _line(longer_s)[1] if len(longer_s) > 1 else 0.0
    most = max(longer_s)
    return max(token_s or longer_s[most] / most, _LEAST_TOKEN_S)


def _line(seconds: dict[int, float]) -> tuple[float, float]:
    """Returns the fixed seconds and those per unit of size."""
    sizes, took_s = np.array([*seconds], float), np.array([*seconds.values()])
    fixed_s, unit_s = least_squares(np.stack([np.ones_like(sizes), sizes], axis=1), took_s).tolist()
    return fixed_s, unit_s
