"""Evaluates a demo model on held-out prompts, with transformers: `python -m research.demo_model.evaluate [DIR]`."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alignedserve.demo import MODEL_DIR
from alignedserve.demo.tasks import TASKS, TaskExample, check, expected_output_len

MAX_AT_ONCE = 25


@dataclass(frozen=True)
class AnsweredTask:
    example: TaskExample
    text: str
    # Number of tokens, including the end token.
    num_tokens: int

    @property
    def is_right(self) -> bool:
        return check(self.example, self.text) and self.num_tokens == expected_output_len(self.example)


class Answerer:
    """Computes greedy answers of a model in a folder, with transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._tokenizer: Any = AutoTokenizer.from_pretrained(folder, padding_side="left")
        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)

    def answer(self, examples: Sequence[TaskExample]) -> list[AnsweredTask]:
        """Returns the answers. Prompts are batched by length, which keeps padding short."""
        ordered = sorted(examples, key=lambda example: len(example.prompt))
        batches = [ordered[at : at + MAX_AT_ONCE] for at in range(0, len(ordered), MAX_AT_ONCE)]
        return [answered for batch in batches for answered in self._answer(batch)]

    @torch.inference_mode()
    def _answer(self, examples: list[TaskExample]) -> list[AnsweredTask]:
        inputs = self._tokenizer.apply_chat_template(
            [[{"role": "user", "content": example.prompt}] for example in examples],
            add_generation_prompt=True,
            padding=True,
            return_tensors="pt",
            return_dict=True,
        )
        longest = max(expected_output_len(example) for example in examples)
        output = self._model.generate(**inputs, do_sample=False, max_length=None, max_new_tokens=longest + 8)
        texts = output[:, inputs["input_ids"].shape[1] :]
        return [self._ended(*pair) for pair in zip(examples, texts.tolist(), strict=True)]

    def _ended(self, example: TaskExample, tokens: list[int]) -> AnsweredTask:
        end = self._tokenizer.eos_token_id
        num_tokens = tokens.index(end) + 1 if end in tokens else len(tokens)
        text = self._tokenizer.decode(tokens[:num_tokens], skip_special_tokens=True)
        return AnsweredTask(example, text, num_tokens)


def held_out(num_per_task: int, seed: int) -> dict[str, list[TaskExample]]:
    rng = random.Random(seed)
    return {
        name: [task.generate(rng, held_out=True) for _ in range(num_per_task)] for name, task in TASKS.items()
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=MODEL_DIR)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--num-per-task", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--show-wrong", type=int, default=0, help="number of wrong answers of each task to print"
    )
    options = parser.parse_args()
    answerer = Answerer(options.folder, getattr(torch, options.dtype))
    num_right = 0
    for name, examples in held_out(options.num_per_task, options.seed).items():
        answers = answerer.answer(examples)
        wrong = [answered for answered in answers if not answered.is_right]
        num_right += len(answers) - len(wrong)
        print(f"{name:9} {100 - 100 * len(wrong) / len(answers):6.2f} %", flush=True)
        for answered in wrong[: options.show_wrong]:
            print(
                f"    {answered.example.prompt[-70:]!r} -> {answered.text!r}, not {answered.example.answer!r}"
            )
    share = num_right / (len(TASKS) * options.num_per_task)
    print(f"all       {100 * share:6.2f} %  ({options.dtype})")
    return 0 if share >= 0.98 else 1


if __name__ == "__main__":
    sys.exit(main())
