"""Seeds of a request's continuations."""

from __future__ import annotations

_MASK = 2**64 - 1


def mix64(x: int) -> int:
    """splitmix64's finalizer: a bijection of 64-bit numbers that scatters neighbours."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def child_seed(seed: int, index: int) -> int:
    """Returns the seed of the index-th of a request's n continuations. The first one has the request's own seed."""
    return seed if index == 0 else mix64(seed ^ mix64(index))
