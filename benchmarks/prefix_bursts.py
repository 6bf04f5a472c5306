"""Measures simultaneous prompts with a common prefix, with and without prefix caching, and on vLLM for CPU, in turn.

    python -m benchmarks.prefix_bursts [--vllm-python VENV/bin/python] [--rounds 2] [--out FILE]

- choices: one prompt with eight answers (`n=8`)
- lines: 16 calls with one system prompt, like the lines of a batch job or the users of one page

The model is that of `prefix_caching.py`. Each case runs three times, with new words each time.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Awaitable, Callable

import openai

from benchmarks.harness import JSON_FILE, parser_of
from benchmarks.prefix_caching import NAME, compare_servers, words

NUM_TIMES = 3
NUM_CHOICES, NUM_LINES = 8, 16
# Words of the system prompt and of each question, and tokens per answer.
SYSTEM, QUESTION, ANSWER = 100, 10, 4

# Returns the seconds until everything is answered.
Measure = Callable[[openai.AsyncOpenAI, random.Random], Awaitable[float]]


async def choices(client: openai.AsyncOpenAI, dice: random.Random) -> float:
    begun_s = time.perf_counter()
    await ask(client, words(SYSTEM, dice), words(QUESTION, dice), NUM_CHOICES)
    return time.perf_counter() - begun_s


async def lines(client: openai.AsyncOpenAI, dice: random.Random) -> float:
    system = words(SYSTEM, dice)
    questions = [words(QUESTION, dice) for _ in range(NUM_LINES)]
    begun_s = time.perf_counter()
    await asyncio.gather(*(ask(client, system, question, 1) for question in questions))
    return time.perf_counter() - begun_s


async def ask(client: openai.AsyncOpenAI, system: str, question: str, num_choices: int) -> None:
    await client.chat.completions.create(
        model=NAME,
        messages=[{"role": "system", "content": system}, {"role": "user", "content": question}],
        n=num_choices,
        temperature=1.0,
        max_tokens=ANSWER,
        extra_body={"ignore_eos": True},
    )


CASES: dict[str, Measure] = {"choices": choices, "lines": lines}


async def measure(url: str, seed: int) -> dict[str, list[float]]:
    dice = random.Random(seed)
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:
        return {name: [await case(client, dice) for _ in range(NUM_TIMES)] for name, case in CASES.items()}


def main() -> None:
    parser = parser_of(__doc__, rounds=2, out=JSON_FILE)
    parser.add_argument("--vllm-python")
    compare_servers(parser.parse_args(), measure, line_of, "seconds")


def line_of(name: str, rounds: list[dict[str, list[float]]]) -> str:
    medians = (
        f"{case} {statistics.median(second for each in rounds for second in each[case]) * 1e3:7.0f}"
        for case in CASES
    )
    return f"{name:26} until all is answered, median, ms: {'  '.join(medians)}"


if __name__ == "__main__":
    main()
