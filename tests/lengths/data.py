"""Prompts with lengths that are known, and predictors that have learned some."""

from __future__ import annotations

import random
from collections.abc import Iterable

from alignedserve import demo
from alignedserve.demo.tasks import TASKS, expected_output_len
from alignedserve.lengths.corpus import TIER, UNLIMITED
from alignedserve.lengths.evaluate import AnsweredPrompt
from alignedserve.lengths.hash_encoder import HashEncoder
from alignedserve.lengths.predictor import Predictor
from alignedserve.text.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(demo.MODEL_DIR)
MAX_MODEL_LEN = 2048


def prompt(text: str) -> list[int]:
    return TOKENIZER.chat_ids([{"role": "user", "content": text}])


def demo_tasks(count: int, seed: int = 0) -> list[AnsweredPrompt]:
    rng = random.Random(seed)
    examples = [rng.choice(list(TASKS.values())).generate(rng) for _ in range(count)]
    return [AnsweredPrompt(prompt(each.prompt), expected_output_len(each)) for each in examples]


def new_predictor(max_entries: int = 1000) -> Predictor:
    return Predictor(HashEncoder(), MAX_MODEL_LEN, max_entries)


def teach(
    predictor: Predictor, answers: Iterable[AnsweredPrompt], reason: str = "stop", tier: str = TIER
) -> None:
    for each in answers:
        predictor.learn(predictor.predict(each.prompt, UNLIMITED, tier), each.length, reason)
