"""Measures a predictor on prompts with known answers: it learns from some, and predicts the others."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from alignedserve.lengths.corpus import TIER, UNLIMITED
from alignedserve.lengths.prediction import Prediction
from alignedserve.lengths.predictor import Predictor

NUM_BINS = 10

Lengths = NDArray[np.float64]


@dataclass(frozen=True)
class AnsweredPrompt:
    prompt: list[int]
    # Tokens of the answer, its last one included.
    length: int


@dataclass(frozen=True)
class Score:
    # The share of answers in the predicted bin, of NUM_BINS equally wide bins.
    accuracy: float
    # The mean of |predicted - true| / true.
    mean_error: float
    median_error: float


@dataclass(frozen=True)
class Evaluation:
    num_learned: int
    num_predicted: int
    # The score of each way of predicting.
    scores: Mapping[str, Score]
    sources: Mapping[str, int]
    # Median and p99, in microseconds.
    predict_us: tuple[float, float]
    learn_us: tuple[float, float]


def evaluate(predictor: Predictor, data: Sequence[AnsweredPrompt], train_share: float) -> Evaluation:
    """Learns from the first `train_share` of the data, and predicts the rest. Raises ValueError if one of the two parts
    is empty."""
    num_learned = round(len(data) * train_share)
    learned, asked = data[:num_learned], data[num_learned:]
    if not learned or not asked:
        raise ValueError(
            f"train_share={train_share}: leaves {len(learned)} to learn and {len(asked)} to predict"
        )
    learn_us = [_learn(predictor, each) for each in learned]
    predictions, predict_us = zip(*(_timed(predictor, each) for each in asked), strict=True)
    lengths = np.array([each.length for each in asked], dtype=np.float64)
    usual = math.exp(sum(math.log(each.length) for each in learned) / len(learned))
    guesses = dict(_guesses(predictions)) | {"class, geometric mean": np.full(len(asked), usual)}
    return Evaluation(
        len(learned),
        len(asked),
        {name: score(each, lengths) for name, each in guesses.items()},
        Counter(prediction.source for prediction in predictions),
        _quantiles(predict_us),
        _quantiles(learn_us),
    )


def score(predicted: Lengths, lengths: Lengths) -> Score:
    errors = np.abs(predicted - lengths) / lengths
    edges = np.linspace(lengths.min(), lengths.max(), NUM_BINS + 1)[1:-1]
    is_right = np.digitize(predicted, edges) == np.digitize(lengths, edges)
    return Score(float(is_right.mean()), float(errors.mean()), float(np.median(errors)))


def _guesses(predictions: Sequence[Prediction]) -> Iterator[tuple[str, Lengths]]:
    def all_of(name: str, choose: Callable[[Prediction], int]) -> tuple[str, Lengths]:
        return name, np.array([choose(prediction) for prediction in predictions], dtype=np.float64)

    yield all_of("predictor", lambda each: each.length)
    if all("regression" in each.guesses for each in predictions):
        yield all_of(
            "neighbours, else regression",
            lambda each: each.guesses.get("neighbours", each.guesses["regression"]),
        )
        yield all_of("regression alone", lambda each: each.guesses["regression"])
    yield all_of("class mean", lambda each: each.guesses["class"])


def _learn(predictor: Predictor, answered: AnsweredPrompt) -> float:
    prediction = predictor.predict(answered.prompt, UNLIMITED, TIER)
    start_s = time.perf_counter()
    predictor.learn(prediction, answered.length, "stop")
    return (time.perf_counter() - start_s) * 1e6


def _timed(predictor: Predictor, answered: AnsweredPrompt) -> tuple[Prediction, float]:
    start_s = time.perf_counter()
    prediction = predictor.predict(answered.prompt, UNLIMITED, TIER)
    return prediction, (time.perf_counter() - start_s) * 1e6


def _quantiles(values: Sequence[float]) -> tuple[float, float]:
    median, p99 = np.percentile(values, (50, 99))
    return float(median), float(p99)
