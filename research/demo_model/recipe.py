"""The three training stages of the demo model: learning the tasks, correcting the rest, and days and months."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TrainingStage:
    name: str
    # Optimizer steps, of about 4,600 tokens each.
    steps: int
    # Frequency of each task. Tasks that take longest to learn occur most often.
    weights: Mapping[str, float]
    # Minimum weight of the end of an answer. When to stop takes longest to learn. A model that has learned it should
    # expect the end exactly as often as it occurs.
    min_end_weight: float
    # Peak learning rates of the matrices and of everything else.
    matrix_lr: float
    other_lr: float
    # Shares of the steps in which the rates rise, and fall to zero.
    warm_up: float
    decay: float
    # Shares of the steps before the first middle rows, the first long rows and the longest lists.
    middle_from: float
    long_from: float
    longest_from: float
    # Shares of these rows afterwards; the others are short.
    middle_share: float
    long_share: float
    seed: int


LEARN = TrainingStage(
    name="learn",
    steps=4500,
    weights={
        "add": 8.0,
        "subtract": 7.0,
        "reverse": 4.0,
        "repeat": 3.0,
        "count": 2.5,
        "pick": 2.5,
        "count_down": 2.0,
        "spell": 0.8,
        "alphabet": 0.8,
        "alphabet_back": 0.6,
        "days": 0.8,
        "months": 0.8,
    },
    min_end_weight=0.5,
    matrix_lr=0.012,
    other_lr=0.002,
    warm_up=0.01,
    decay=0.55,
    middle_from=0.1,
    long_from=0.45,
    longest_from=0.675,
    middle_share=0.25,
    long_share=0.08,
    seed=0,
)

POLISH = TrainingStage(
    name="polish",
    steps=3300,
    weights={
        "subtract": 7.0,
        "add": 4.0,
        "repeat": 5.0,
        "count": 5.0,
        "count_down": 5.0,
        "pick": 4.0,
        "reverse": 3.0,
        "spell": 2.0,
        "alphabet": 1.0,
        "alphabet_back": 1.0,
        "days": 1.2,
        "days_back": 1.2,
        "months": 1.2,
        "months_back": 1.2,
    },
    min_end_weight=0.15,
    matrix_lr=0.008,
    other_lr=0.001,
    warm_up=0.02,
    decay=0.95,
    middle_from=0.0,
    long_from=0.0,
    longest_from=0.0,
    middle_share=0.3,
    long_share=0.14,
    seed=1,
)

FINISH = TrainingStage(
    name="finish",
    steps=900,
    weights={
        "subtract": 4.0,
        "add": 4.0,
        "repeat": 6.0,
        "count": 3.0,
        "count_down": 3.0,
        "pick": 6.0,
        "reverse": 2.0,
        "spell": 2.0,
        "alphabet": 1.0,
        "alphabet_back": 1.0,
        "days": 3.0,
        "days_back": 3.0,
        "months": 2.0,
        "months_back": 2.0,
    },
    min_end_weight=0.15,
    matrix_lr=0.004,
    other_lr=0.0005,
    warm_up=0.05,
    decay=0.95,
    middle_from=0.0,
    long_from=0.0,
    longest_from=0.0,
    middle_share=0.25,
    long_share=0.16,
    seed=2,
)

STAGES = (LEARN, POLISH, FINISH)
