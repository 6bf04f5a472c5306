"""The fixed list of requests that the client sends. Determined by a seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from alignedserve.bench.workload import Item, Messages
from alignedserve.demo.words import any_word
from alignedserve.text.tokenizer import Tokenizer

# Share of all requests; the others are best effort without a window.
RT_SHARE = 0.5
TTFT_S = 0.5
RT_OUTPUT, BE_OUTPUT = (32, 96), (60, 200)
# Words in a best-effort prompt: about 150 to 650 of the demo model's tokens.
BE_WORDS = (15, 60)
# The most tokens of prompt and output together.
MAX_TOKENS = 1024


@dataclass(frozen=True)
class Asked(Item):
    # The objective between two tokens in seconds; None for best effort.
    tbt_s: float | None = None
    ttft_s: float = TTFT_S


def alone(tokenizer: Tokenizer, num_requests: int, apart_s: float, tbt_s: float) -> list[Asked]:
    """Returns real-time requests, one after the other."""
    dice = random.Random(2)
    chat = [{"role": "user", "content": _count(dice)}]
    prompt_len = len(tokenizer.chat_ids(chat))
    return [
        Asked(number * apart_s, "rt", chat, RT_OUTPUT[0], prompt_len, tbt_s=tbt_s)
        for number in range(num_requests)
    ]


def fixed_list(
    tokenizer: Tokenizer, rate: float | None, num_requests: int, tbt_s: Sequence[float], seed: int
) -> list[Asked]:
    """Returns requests with Poisson arrivals at `rate` per second; None: all at once. Real time has one of the
    objectives `tbt_s`."""
    dice, time_s, found = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        time_s += dice.expovariate(rate) if rate else 0.0
        found.append(_asked(tokenizer, time_s, tbt_s, dice))
    return found


def _asked(tokenizer: Tokenizer, time_s: float, all_tbt_s: Sequence[float], dice: random.Random) -> Asked:
    is_rt = dice.random() < RT_SHARE
    chat = [{"role": "user", "content": _count(dice) if is_rt else _question(dice)}]
    prompt_len, num_output = len(tokenizer.chat_ids(chat)), dice.randint(*(RT_OUTPUT if is_rt else BE_OUTPUT))
    if prompt_len + num_output > MAX_TOKENS:
        raise ValueError(
            f"a prompt of {prompt_len} tokens and {num_output} of output: must be {MAX_TOKENS} at most"
        )
    tbt_s = dice.choice(all_tbt_s) if is_rt else None
    return Asked(time_s, "rt" if is_rt else "be", chat, num_output, prompt_len, tbt_s=tbt_s)


def _count(dice: random.Random) -> str:
    first = dice.randint(100, 900)
    return f"Count from {first} to {first + 20}."


def _question(dice: random.Random) -> str:
    return _about_list([any_word(dice) for _ in range(dice.randint(*BE_WORDS))], dice)


def listed(tokenizer: Tokenizer, num_tokens: int, dice: random.Random) -> Messages:
    """Returns a question about a list: about `num_tokens` long, with at least one word."""
    words = [any_word(dice)]
    while True:
        chat = [{"role": "user", "content": _about_list(words, random.Random(0))}]
        if len(tokenizer.chat_ids(chat)) >= num_tokens:
            return chat
        words.append(any_word(dice))


def _about_list(words: Sequence[str], dice: random.Random) -> str:
    numbered = ", ".join(f"{place} {word}" for place, word in enumerate(words, start=1))
    return f"Here is a list: {numbered}. Which word is number {dice.randint(1, len(words))}?"
