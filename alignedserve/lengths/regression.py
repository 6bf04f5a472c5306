"""Ridge regression of an answer's log-length on what is known of its prompt, learned one answer at a time.

Sums over all answers, the older ones weighted less, are solved anew now and then: by conjugate gradients, from where
they were, and without BLAS. Its threads spin while they wait for each other: where other processes have the cores, a
solution that takes one thread a millisecond took 150.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from alignedserve.lengths.prediction import Query

Matrix = NDArray[np.float64]

PENALTY = 1.0
# of an answer's weight, with each that comes after it
DECAY = 1 - 1 / 20_000
MIN_ANSWERS = 64
# Solving takes a millisecond: as often as the answers grow by this share, at least so often.
SOLVE_SHARE = 0.05
MAX_UNSOLVED = 256
# of what is to be met, so much may be missed
TOLERANCE = 1e-5
MAX_STEPS = 50
# of e: no answer is longer
MAX_LOG = 20.0


class Regression:
    def __init__(self, dim: int) -> None:
        # besides the vector: a constant, and see _features
        size = dim + 4
        self.products: Matrix = np.zeros((size, size))
        self.targets: Matrix = np.zeros(size)
        self.num_answers = 0
        self.weights: Matrix = np.zeros(size)
        self._num_unsolved = 0

    @property
    def is_ready(self) -> bool:
        return self.num_answers >= MIN_ANSWERS

    def predict(self, query: Query) -> float:
        return math.exp(min(float(_features(query) @ self.weights), MAX_LOG))

    def learn(self, query: Query, length: int) -> None:
        x = _features(query)
        self.products *= DECAY
        self.products += np.outer(x, x)
        self.targets *= DECAY
        self.targets += x * math.log(length)
        self.num_answers += 1
        self._num_unsolved += 1
        if self._num_unsolved >= min(MAX_UNSOLVED, max(1, SOLVE_SHARE * self.num_answers)) and self.is_ready:
            self.solve()

    def solve(self) -> None:
        self._num_unsolved = 0
        residual = self.targets - self._times(self.weights)
        direction, size = residual, residual @ residual
        enough = TOLERANCE**2 * (self.targets @ self.targets)
        for _ in range(MAX_STEPS):
            if size <= enough:
                return
            product = self._times(direction)
            step = size / (direction @ product)
            self.weights = self.weights + step * direction
            residual = residual - step * product
            size, last = residual @ residual, size
            direction = residual + (size / last) * direction

    def _times(self, vector: Matrix) -> Matrix:
        """What the sums and the penalty make of it."""
        product: Matrix = np.einsum("ij,j->i", self.products, vector) + PENALTY * vector
        return product


def _features(query: Query) -> Matrix:
    numbers = [1.0, math.log(query.prompt_len + 1) / 8, math.log(query.most) / 8, float(query.tier == "be")]
    return np.concatenate([query.vector.astype(np.float64), numbers])
