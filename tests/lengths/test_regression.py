from __future__ import annotations

import math

import numpy as np
import pytest

from alignedserve.lengths.prediction import Query
from alignedserve.lengths.regression import MAX_LOG, MIN_ANSWERS, PENALTY, Regression, _features

DIM = 8


def query(rng: np.random.Generator, prompt_len: int = 100) -> Query:
    vector = rng.standard_normal(DIM)
    vector /= np.linalg.norm(vector)
    return Query(vector.astype(np.float32), prompt_len, "rt", 1, 1000, is_natural=True)


def true_length(asked: Query) -> int:
    return max(1, round(math.exp(4 + 1.5 * float(asked.vector[0]) - float(asked.vector[3]))))


def test_it_learns_what_is_linear_in_the_logarithm() -> None:
    rng, regression = np.random.default_rng(0), Regression(DIM)
    for _ in range(2000):
        asked = query(rng)
        regression.learn(asked, true_length(asked))
    for _ in range(50):
        asked = query(rng)
        assert regression.predict(asked) == pytest.approx(true_length(asked), rel=0.1)


def test_its_solution_is_the_plain_one() -> None:
    rng, regression = np.random.default_rng(0), Regression(DIM)
    for _ in range(500):
        asked = query(rng, prompt_len=int(rng.integers(1, 2000)))
        regression.learn(asked, int(rng.integers(1, 300)))
        if regression.is_ready:
            regression.solve()
            size = len(regression.targets)
            plain = np.linalg.solve(regression.products + PENALTY * np.eye(size), regression.targets)
            expected = float(np.exp(_features(asked) @ plain))
            assert regression.predict(asked) == pytest.approx(expected, rel=0.02)


def test_it_follows_when_lengths_change() -> None:
    rng, regression = np.random.default_rng(0), Regression(DIM)
    for length in (10, 1000):
        for _ in range(40_000 if length == 1000 else 2000):
            regression.learn(query(rng), length)
    assert regression.predict(query(rng)) == pytest.approx(1000, rel=0.35)


def test_it_is_silent_until_it_has_seen_enough() -> None:
    rng, regression = np.random.default_rng(0), Regression(DIM)
    for _ in range(MIN_ANSWERS - 1):
        regression.learn(query(rng), 5)
    assert not regression.is_ready
    regression.learn(query(rng), 5)
    assert regression.is_ready and regression.predict(query(rng)) == pytest.approx(5, rel=0.1)


def test_no_length_is_beyond_all_bounds() -> None:
    regression = Regression(DIM)
    regression.weights[:] = 1e6
    assert regression.predict(query(np.random.default_rng(1))) <= math.exp(MAX_LOG)
