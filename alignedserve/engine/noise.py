"""Keys of the sampling noise. The noise for a request's token k is a function of (seed, k) alone. Its tokens therefore
don't depend on its batch, on preemption, or on the machine that continues it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def noise_keys(seeds: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """The 64-bit key for each request's next token, the one after `counts` others.

    Keys are int64, because torch has no arithmetic on unsigned numbers.
    """
    # A continuation's seed has 64 bits, and a client's seed may be negative.
    of_request = _mix64(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
    number = np.array(counts, dtype=np.uint64) + np.uint64(1)
    return torch.from_numpy(_mix64(of_request + number * np.uint64(0x9E3779B97F4A7C15)).view(np.int64))


def _mix64(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """alignedserve.seeds.mix64 of each number. numpy's products keep the low 64 bits."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
