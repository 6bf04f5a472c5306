"""Ridge regression of an answer's log-length on features of its request, learned one answer at a time.

It keeps sums over all answers, with less weight for older ones. Now and then it solves them again, by conjugate
gradients from the last solution. It does so without BLAS: BLAS's threads spin while they wait for each other. With
other processes on the cores, a solution that takes one thread a millisecond took 150.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from alignedserve.lengths.prediction import Query

Matrix = NDArray[np.float64]

PENALTY = 1.0
# An answer's weight is multiplied by this with each later answer.
DECAY = 1 - 1 / 20_000
MIN_ANSWERS = 64
# Solving takes a millisecond. It is repeated when the number of answers has grown by this share, and after MAX_UNSOLVED
# answers at the latest.
SOLVE_SHARE = 0.05
MAX_UNSOLVED = 256
# The allowed residual, relative to the targets.
TOLERANCE = 1e-5
MAX_STEPS = 50
# The greatest predicted log-length.
MAX_LOG = 20.0


class Regression:
    def __init__(self, dim: int) -> None:
        # The vector, a constant, and the other numbers in `_features`.
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
        """Returns (sums + penalty) times the vector."""
        product: Matrix = np.einsum("ij,j->i", self.products, vector) + PENALTY * vector
        return product


def _features(query: Query) -> Matrix:
    numbers = [1.0, math.log(query.prompt_len + 1) / 8, math.log(query.most) / 8, float(query.tier == "be")]
    return np.concatenate([query.vector.astype(np.float64), numbers])
