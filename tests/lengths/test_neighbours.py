from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.lengths.neighbours import MAX_ANSWERS, Answers, Neighbours
from alignedserve.lengths.prediction import Vector

DIM = 16


def vector(seed: int) -> Vector:
    found = np.random.default_rng(seed).standard_normal(DIM)
    return (found / np.linalg.norm(found)).astype(np.float32)


def lengths_near(neighbours: Neighbours, at: Vector, count: int = 3, threshold: float = -1.0) -> list[float]:
    return [each.answers.length for each in neighbours.near(at, count, threshold)]


@given(
    seeds=st.lists(st.integers(0, 40), max_size=120), max_entries=st.integers(1, 12), asked=st.integers(0, 40)
)
@settings(max_examples=60, deadline=None)
def test_it_never_holds_more_than_it_may_and_finds_the_nearest(
    seeds: list[int], max_entries: int, asked: int
) -> None:
    neighbours = Neighbours(DIM, max_entries)
    kept: list[int] = []
    for seed in seeds:
        neighbours.remember(vector(seed), seed + 1, is_cut=False)
        kept = [*(each for each in kept if each != seed), seed][-max_entries:]
    assert len(neighbours) == len(kept) == len(neighbours._index) == len(neighbours._keys)
    by_distance = sorted(kept, key=lambda seed: -float(vector(seed) @ vector(asked)))
    assert lengths_near(neighbours, vector(asked)) == [seed + 1 for seed in by_distance[:3]]


def test_memory_stays_what_it_is_once_it_is_full() -> None:
    neighbours = Neighbours(DIM, 64)
    sizes = set()
    for seed in range(64 * 8):
        neighbours.remember(vector(seed), 1, is_cut=False)
        if seed >= 64 * 2:
            sizes.add(neighbours._index.memory_usage)
    assert len(sizes) == 1
    assert len(neighbours._vectors) == len(neighbours._keys) == len(neighbours._answers) == 64


def test_what_is_below_the_threshold_is_no_neighbour() -> None:
    neighbours = Neighbours(DIM, 100)
    for seed in range(100):
        neighbours.remember(vector(seed), 1, is_cut=False)
    for threshold in (0.9, 0.5, 0.2):
        similarities = [each.similarity for each in neighbours.near(vector(7), 100, threshold)]
        true = [s for seed in range(100) if (s := float(vector(seed) @ vector(7))) >= threshold]
        assert similarities == pytest.approx(sorted(true, reverse=True), abs=0.01)


def test_whoever_was_found_stays_longer() -> None:
    neighbours = Neighbours(DIM, 3)
    for seed in (1, 2, 3):
        neighbours.remember(vector(seed), seed, is_cut=False)
    neighbours.near(vector(1), 1, 0.9)
    neighbours.remember(vector(4), 4, is_cut=False)
    assert sorted(lengths_near(neighbours, vector(1), count=5)) == [1, 3, 4]


def test_the_same_prompts_answers_are_one_entry() -> None:
    neighbours = Neighbours(DIM, 10)
    for length in (10, 20, 30):
        neighbours.remember(vector(1), length, is_cut=False)
    neighbours.remember(vector(1), 500, is_cut=True)
    assert len(neighbours) == 1
    assert neighbours.near(vector(1), 5, 0.9)[0].answers == Answers(20.0, 3, cut_at=500)


def test_old_answers_fade() -> None:
    answers = Answers(0.0, 0)
    for length in [10] * 100 + [90] * 4 * MAX_ANSWERS:
        answers = answers.with_one(length, is_cut=False)
    assert answers.length == pytest.approx(90, rel=0.02)
