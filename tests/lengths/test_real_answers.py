"""The lengths of a published model's answers are predicted from its earlier ones."""

from __future__ import annotations

import numpy as np
import pytest

from alignedserve import LLM, SamplingParams
from alignedserve.lengths.corpus import TIER
from alignedserve.lengths.hash_encoder import HashEncoder
from alignedserve.lengths.predictor import Predictor
from tests import real_weights

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=8, turn=5)]

SHORT = [
    f"What is the capital of {each}?"
    for each in ("France", "Germany", "Italy", "Spain", "Japan", "Egypt", "Norway", "Peru", "Kenya", "Poland")
]
LONG = [
    f"Write a long story about {each}."
    for each in (
        "dogs",
        "kings",
        "sailors",
        "trains",
        "gardens",
        "clocks",
        "moons",
        "letters",
        "ships",
        "storms",
    )
]
NUM_LEARNED, MAX_MODEL_LEN = 7, 256
# Stories are longer.
PARAMS = SamplingParams(temperature=0, max_tokens=64)


def answer_all(questions: list[str]) -> list[tuple[list[int], int, str]]:
    """Returns each prompt, with the length of its answer and why that ended."""
    llm = LLM(real_weights.smollm2(), dtype="float32", max_model_len=MAX_MODEL_LEN, use_tqdm=False)
    results = llm.chat([[{"role": "user", "content": each}] for each in questions], PARAMS, use_tqdm=False)
    outputs = [each.outputs[0] for each in results]
    return [
        (result.prompt_token_ids, len(output.token_ids), output.finish_reason or "")
        for result, output in zip(results, outputs, strict=True)
    ]


def test_other_questions_of_the_same_kinds_are_told_apart() -> None:
    answers = answer_all([*SHORT, *LONG])
    short, long = answers[: len(SHORT)], answers[len(SHORT) :]
    learned, asked = short[:NUM_LEARNED] + long[:NUM_LEARNED], short[NUM_LEARNED:] + long[NUM_LEARNED:]
    predictor = Predictor(HashEncoder(), MAX_MODEL_LEN)
    for prompt, length, reason in learned:
        predictor.learn(predictor.predict(prompt, PARAMS, TIER), length, reason)
    predicted = np.array([predictor.predict(prompt, PARAMS, TIER).length for prompt, _, _ in asked])
    assert max(predicted[: len(asked) // 2]) < min(predicted[len(asked) // 2 :])
    lengths = np.array([length for _, length, _ in asked])
    mean = np.mean([length for _, length, _ in learned])
    assert np.mean(np.abs(predicted - lengths)) < 0.5 * np.mean(np.abs(mean - lengths))
