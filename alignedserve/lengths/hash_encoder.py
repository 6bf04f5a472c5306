"""Token n-grams, hashed into a fixed number of dimensions. Needs no download and no text.

A bit of the hash decides whether an n-gram adds +1 or -1, so that n-grams with the same dimension cancel out on
average. The square root makes a word that is repeated a hundred times count ten times. Only the beginning and the end
of a long prompt are used.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from alignedserve.lengths.encoder import Encoder
from alignedserve.lengths.prediction import Vector

DIM = 256
MAX_NGRAM = 2
MAX_HEAD = 256
MAX_TAIL = 768

# Odd numbers with well-mixed bits: 2**64 over the golden ratio, and two constants of splitmix64.
_STEP, _MIX, _LAST = (
    np.uint64(each) for each in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
_HALF, _SIGN = np.uint64(31), np.uint64(63)


class HashEncoder(Encoder):
    name = f"hash-{DIM}-{MAX_NGRAM}"
    dim = DIM
    threshold = 0.6

    def encode(self, prompt: Sequence[int]) -> Vector:
        if len(prompt) > MAX_HEAD + MAX_TAIL:
            prompt = [*prompt[:MAX_HEAD], *prompt[-MAX_TAIL:]]
        hashes = _ngrams(np.asarray(prompt, dtype=np.uint64))
        signs = 1.0 - 2.0 * (hashes >> _SIGN).astype(np.float64)
        counts = np.bincount((hashes % np.uint64(DIM)).astype(np.intp), signs, minlength=DIM)
        rooted = np.sign(counts) * np.sqrt(np.abs(counts))
        vector: Vector = (rooted / max(np.linalg.norm(rooted), 1e-9)).astype(np.float32)
        return vector


def _ngrams(ids: NDArray[np.uint64]) -> NDArray[np.uint64]:
    found, hashes = [], np.zeros(len(ids) + 1, dtype=np.uint64)
    for size in range(1, MAX_NGRAM + 1):
        # Each n-gram's hash is computed from the hash of the shorter one at the same position.
        hashes = _mixed(hashes[:-1] * _LAST + ids[size - 1 :] + _STEP)
        found.append(hashes)
    return np.concatenate(found)


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = (values ^ (values >> _HALF)) * _MIX
    return values ^ (values >> _HALF)
