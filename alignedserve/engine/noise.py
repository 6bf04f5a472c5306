"""Keys of the sampling noise. The noise for a request's token k is a function of (seed, k) alone, so that its
tokens don't depend on its batch, on preemption, or on the machine that continues it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

_MASK = 2**64 - 1


def mix64(x: int) -> int:
    """splitmix64's finalizer: a bijection of 64-bit numbers that scatters neighbours."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def noise_key(seed: int, k: int) -> int:
    """64 bits for the request's k-th output token (from 0)."""
    return mix64(mix64(seed) + (k + 1) * 0x9E3779B97F4A7C15)


def noise_keys(draws: Iterable[tuple[int, int]]) -> torch.Tensor:
    """The keys of several (seed, k), as int64: torch has no arithmetic on unsigned ones."""
    keys = np.array([noise_key(seed, k) for seed, k in draws], dtype=np.uint64)
    return torch.from_numpy(keys.view(np.int64))


def child_seed(seed: int, index: int) -> int:
    """The seed of the index-th of a request's n continuations; the first one has the request's own."""
    return seed if index == 0 else mix64(seed ^ mix64(index))
