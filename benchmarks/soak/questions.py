"""The questions of chats and of lines of jobs, and the right answers."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve import LLM, SamplingParams, demo
from alignedserve.demo.words import any_word

MODEL = "demo"
MIN_OUTPUT, MAX_OUTPUT = 16, 400
# Words of a long prompt: about 100 to 500 of the demo model's tokens.
MIN_WORDS, MAX_WORDS = 20, 80


@dataclass(frozen=True)
class Question:
    text: str
    # With the names of the API and of SamplingParams.
    settings: Mapping[str, Any]

    @property
    def body(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": self.text}]
        return {"model": MODEL, "messages": messages, **self.settings}


@dataclass(frozen=True)
class Answer:
    text: str
    num_tokens: int
    finish_reason: str


def make_questions(seed: int, count: int) -> list[Question]:
    """Makes greedy and seeded questions in turn. Half of them run to their limit, whatever the model generates."""
    dice = random.Random(f"questions {seed}")
    return [Question(_text(dice), _settings(dice, is_greedy=number % 2 == 0)) for number in range(count)]


def _text(dice: random.Random) -> str:
    if dice.random() < 0.7:
        first = dice.randint(1, 900)
        return f"Count from {first} to {first + dice.randint(3, 40)}."
    words = [any_word(dice) for _ in range(dice.randint(MIN_WORDS, MAX_WORDS))]
    listed = ", ".join(f"{place} {word}" for place, word in enumerate(words, start=1))
    return f"Here is a list: {listed}. Which word is number {dice.randint(1, len(words))}?"


def _settings(dice: random.Random, is_greedy: bool) -> dict[str, Any]:
    seeded = {
        "temperature": dice.uniform(0.5, 1.2),
        "top_p": dice.choice([1.0, 0.9]),
        "seed": dice.getrandbits(31),
    }
    return {
        **({"temperature": 0.0} if is_greedy else seeded),
        "max_tokens": dice.randint(MIN_OUTPUT, MAX_OUTPUT),
        "ignore_eos": dice.random() < 0.5,
        # A token without text could not be compared.
        "skip_special_tokens": False,
    }


def answers_to(questions: Sequence[Question]) -> list[Answer]:
    """Returns the answers of an engine in this process, on a CPU, in the dtype for which the server must equal it."""
    llm = LLM(str(demo.MODEL_DIR), dtype="float32", device="cpu", use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    prompts = [
        {"prompt_token_ids": tokenizer.chat_ids([{"role": "user", "content": each.text}])}
        for each in questions
    ]
    params = [SamplingParams(**each.settings) for each in questions]
    outputs = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
    return [Answer(each.text, len(each.token_ids), str(each.finish_reason)) for each in outputs]
