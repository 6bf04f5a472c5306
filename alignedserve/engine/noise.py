"""Keys of the sampling noise. The noise for a request's token k is a function of (seed, k) alone, so that its
tokens don't depend on its batch, on preemption, or on the machine that continues it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from alignedserve.seeds import mix64


def noise_key(seed: int, k: int) -> int:
    """64 bits for the request's k-th output token (from 0)."""
    return mix64(mix64(seed) + (k + 1) * 0x9E3779B97F4A7C15)


def noise_keys(draws: Iterable[tuple[int, int]]) -> torch.Tensor:
    """The keys of several (seed, k), as int64: torch has no arithmetic on unsigned ones."""
    keys = np.array([noise_key(seed, k) for seed, k in draws], dtype=np.uint64)
    return torch.from_numpy(keys.view(np.int64))
