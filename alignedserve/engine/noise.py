"""Keys of the sampling noise. The noise for a request's token k is a function of (seed, k) alone, so that its
tokens don't depend on its batch, on preemption, or on the machine that continues it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from alignedserve.seeds import mix64


def noise_keys(seeds: Sequence[int], counts: Sequence[int]) -> torch.Tensor:
    """64 bits for the output token of each request that follows `counts` others.

    As int64: torch has no arithmetic on unsigned numbers.
    """
    # a child's seed has 64 bits, a client's may be negative
    of_request = mix64(np.array([seed % 2**64 for seed in seeds], dtype=np.uint64))
    of_token = (np.array(counts, dtype=np.uint64) + 1) * 0x9E3779B97F4A7C15
    return torch.from_numpy(mix64(of_request + of_token).view(np.int64))
