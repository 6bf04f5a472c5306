"""The small engines' benchmark: simultaneous requests, with input and output lengths uniform between two limits."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Asked:
    prompts: list[list[int]]
    num_outputs: list[int]

    @property
    def num_input_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_output_tokens(self) -> int:
        return sum(self.num_outputs)


def uniform(num_requests: int, shortest: int, longest: int, vocab_size: int, seed: int = 0) -> Asked:
    choose = random.Random(seed)
    prompts = [
        [choose.randrange(vocab_size) for _ in range(choose.randint(shortest, longest))]
        for _ in range(num_requests)
    ]
    return Asked(prompts, [choose.randint(shortest, longest) for _ in range(num_requests)])
