from __future__ import annotations

import random
from typing import Any

import pytest

from alignedserve.lengths.corpus import UNLIMITED
from alignedserve.lengths.evaluate import AnsweredPrompt, evaluate
from alignedserve.lengths.predictor import Predictor
from alignedserve.lengths.regression import MIN_ANSWERS
from alignedserve.lengths.trust import MAX_ERROR, MIN_ERRORS, Trust
from alignedserve.sampling_params import SamplingParams
from tests.lengths.data import MAX_MODEL_LEN, demo_tasks, new_predictor, prompt, teach

COUNT, ADD = prompt("Count from 1 to 60."), prompt("What is 12 + 30?")


def length_of(predictor: Predictor, ids: list[int], **params: Any) -> int:
    return predictor.predict(ids, SamplingParams(**dict[str, Any](max_tokens=None) | params), "rt").length


def test_nothing_is_known_at_first() -> None:
    found = new_predictor().predict(COUNT, UNLIMITED, "rt")
    assert (found.length, found.source, found.confidence) == (0, "unknown", 0.0)


def test_what_the_request_says_needs_no_prediction() -> None:
    predictor = new_predictor()
    for params, length in (
        (SamplingParams(max_tokens=40, ignore_eos=True), 40),
        (SamplingParams(max_tokens=None, ignore_eos=True), MAX_MODEL_LEN - len(COUNT)),
        (SamplingParams(max_tokens=1), 1),
        (SamplingParams(max_tokens=9, min_tokens=9), 9),
    ):
        found = predictor.predict(COUNT, params, "rt")
        assert (found.length, found.source) == (length, "given")
        predictor.learn(found, length, "length")
    held = predictor.predict(COUNT, SamplingParams(max_tokens=40, ignore_eos=True, stop="x"), "rt")
    assert held.source != "given"


def test_neighbours_then_regression_then_the_class() -> None:
    predictor = new_predictor()
    teach(predictor, [AnsweredPrompt(COUNT, 100)])
    assert predictor.predict(COUNT, UNLIMITED, "rt").source == "neighbours"
    assert predictor.predict(prompt("Spell walrus"), UNLIMITED, "rt").source == "class"
    assert predictor.predict(prompt("Spell walrus"), UNLIMITED, "be").source == "unknown"
    teach(predictor, demo_tasks(MIN_ANSWERS))
    strange = predictor.predict(list(range(50, 90)), UNLIMITED, "be")
    assert strange.source == "regression" and strange.similarity == 0.0


def test_no_prediction_leaves_the_limits() -> None:
    predictor = new_predictor()
    teach(predictor, [AnsweredPrompt(COUNT, 100)])
    assert length_of(predictor, COUNT) == 100
    assert length_of(predictor, COUNT, max_tokens=30) == 30
    assert length_of(predictor, COUNT, min_tokens=150) == 150
    long = [*COUNT] * (MAX_MODEL_LEN // len(COUNT))
    assert length_of(predictor, long) <= MAX_MODEL_LEN - len(long)


@pytest.mark.parametrize("reason", ["abort", "error", "rejected"])
def test_what_was_broken_off_teaches_nothing(reason: str) -> None:
    predictor = new_predictor()
    teach(predictor, [AnsweredPrompt(COUNT, 7)] * 5, reason)
    assert length_of(predictor, COUNT) == 0 and not predictor.means


def test_an_answer_that_was_cut_off_is_at_least_that_long() -> None:
    predictor = new_predictor()
    teach(predictor, [AnsweredPrompt(COUNT, 16)] * 3, "length")
    assert length_of(predictor, COUNT, max_tokens=16) == 16
    assert length_of(predictor, COUNT, max_tokens=12) == 12
    assert length_of(predictor, COUNT) == 16
    # those who were not cut off know better
    teach(predictor, [AnsweredPrompt(prompt("Count from 2 to 60."), 170)])
    assert length_of(predictor, COUNT) == 170
    assert length_of(predictor, COUNT, max_tokens=16) == 16


def test_short_limits_do_not_make_the_class_short() -> None:
    predictor = new_predictor()
    teach(predictor, [AnsweredPrompt(COUNT, 100)])
    teach(predictor, [AnsweredPrompt(ADD, 16)] * 50, "length")
    assert predictor.means["rt"].value == 100


def test_memory_is_bounded() -> None:
    predictor = new_predictor(max_entries=100)
    teach(predictor, demo_tasks(400))
    assert len(predictor.neighbours) == 100


def test_it_is_better_than_its_parts_on_the_demo_tasks() -> None:
    scores = {
        name: score.mean_error
        for name, score in evaluate(new_predictor(8192), demo_tasks(2000), 0.8).scores.items()
    }
    assert scores["predictor"] < 0.7 * scores["class mean"]
    assert scores["predictor"] < 0.95 * scores["regression alone"]
    assert scores["predictor"] < 0.9 * scores["class, geometric mean"]


def test_neighbours_that_say_nothing_are_not_believed() -> None:
    """Lengths are the same whatever is asked; only their mean can be known, and a neighbour's own is worse."""
    rng = random.Random(0)
    predictor = new_predictor()
    data = [AnsweredPrompt(each.prompt, rng.choice((20, 22, 200))) for each in demo_tasks(1200)]
    found = evaluate(predictor, data, 0.8)
    assert found.sources["regression"] > 0.6 * found.num_predicted


def test_trust_follows_the_errors_of_each_band_by_itself() -> None:
    trust = Trust()
    for _ in range(MIN_ERRORS):
        assert trust.best(0.9, ("neighbours", "regression")) == "neighbours"
        trust.learn(0.9, {"neighbours": 200, "regression": 110}, 100)
    assert trust.best(0.9, ("neighbours", "regression")) == "regression"
    assert trust.best(0.9, {"neighbours"}) == "neighbours"
    assert trust.best(0.5, ("neighbours", "regression")) == "neighbours"
    assert trust.confidence(0.9, "regression") == pytest.approx(1 / 1.1)
    trust.learn(0.2, {"class": 10**6}, 1)
    assert trust.confidence(0.2, "class") == 1 / (1 + MAX_ERROR)
