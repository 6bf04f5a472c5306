"""Owners do not learn from each other's answers, and share a limited memory."""

from __future__ import annotations

import random

import numpy as np
import pytest

from alignedserve.lengths import owners
from alignedserve.lengths.corpus import UNLIMITED, learn
from alignedserve.lengths.evaluate import AnsweredPrompt
from alignedserve.lengths.hash_encoder import HashEncoder
from alignedserve.lengths.owners import Predictors
from alignedserve.lengths.prediction import Prediction, query_of
from tests.lengths.data import MAX_MODEL_LEN, demo_tasks


def new_predictors(max_entries: int = 1000) -> Predictors:
    return Predictors(HashEncoder(), MAX_MODEL_LEN, max_entries)


def answered(predictors: Predictors, asked: AnsweredPrompt, owner: str) -> Prediction:
    """Predicts, and learns from the answer."""
    found = predictors.predict(asked.prompt, UNLIMITED, "rt", owner)
    predictors.learn(found, asked.length, "stop", owner)
    return found


def test_what_others_ask_changes_no_prediction() -> None:
    """An owner's predictions are those that it would get alone, whether or not others ask the same."""
    rng = random.Random(0)
    together, alone = new_predictors(), new_predictors()
    tasks = demo_tasks(150)
    for each in tasks:
        for other in ("key:b", "group:c"):
            if rng.random() < 0.5:
                strange = AnsweredPrompt(each.prompt, rng.randrange(1, 400))
                answered(together, strange, other)
        mine, expected = answered(together, each, "key:a"), answered(alone, each, "key:a")
        assert mine == expected and (mine.guesses, mine.similarity) == (expected.guesses, expected.similarity)
    assert together.predict(tasks[0].prompt, UNLIMITED, "rt", "key:d").source == "unknown"


def test_a_flood_of_one_owner_takes_its_own_memory() -> None:
    predictors = new_predictors(max_entries=100)
    few = demo_tasks(40, seed=2)
    for each in few:
        answered(predictors, each, "key:b")
    for each in demo_tasks(400):
        answered(predictors, each, "key:a")
        assert predictors.num_prompts <= 100
    for each in few:
        found = predictors.predict(each.prompt, UNLIMITED, "rt", "key:b")
        assert found.source == "neighbours" and found.similarity > 0.99


def test_what_owners_take_is_limited_whatever_the_encoder(monkeypatch: pytest.MonkeyPatch) -> None:
    class Long(HashEncoder):
        dim = 508

    monkeypatch.setattr(owners, "MAX_REGRESSION_BYTES", 4 * 8 * 512**2 - 1)
    predictors = Predictors(Long(), MAX_MODEL_LEN)
    [task] = demo_tasks(1)
    query = query_of(np.zeros(Long.dim, np.float32), len(task.prompt), UNLIMITED, "rt", MAX_MODEL_LEN)
    for owner in ("a", "b", "c", "a", "d"):
        predictors.learn(Prediction(0, "unknown", 0.0, query), task.length, "stop", owner)
    assert [owner for owner, _ in predictors.all()] == ["c", "a", "d"]


def test_an_owner_whose_lengths_are_predicted_is_active(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        owners, "MAX_REGRESSION_BYTES", 2 * new_predictors().taught.regression.products.nbytes
    )
    predictors = new_predictors()
    [task] = demo_tasks(1)
    for owner in ("key:a", "key:b"):
        answered(predictors, task, owner)
    predictors.predict(task.prompt, UNLIMITED, "rt", "key:a")
    predictors.predict(task.prompt, UNLIMITED, "rt", "key:new")
    answered(predictors, task, "key:c")
    assert [owner for owner, _ in predictors.all()] == ["key:a", "key:c"]


def test_a_corpus_predicts_for_all_and_nobody_changes_it() -> None:
    predictors = new_predictors()
    known = demo_tasks(200)
    for each in known:
        assert learn(predictors.taught, each.prompt, each.length)
    before = [predictors.predict(each.prompt, UNLIMITED, "rt", "key:b") for each in known]
    assert {each.source for each in before} == {"neighbours"}
    for each in known:
        answered(predictors, AnsweredPrompt(each.prompt, 1999), "key:a")
    assert [predictors.predict(each.prompt, UNLIMITED, "rt", "key:b") for each in known] == before
    assert predictors.predict(known[0].prompt, UNLIMITED, "rt", "key:a").length != before[0].length
