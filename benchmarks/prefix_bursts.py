"""Prompts that begin alike and come at once, with prefix caching and without, and beside vLLM for CPU, in turn.

    python -m benchmarks.prefix_bursts [--vllm-python VENV/bin/python] [--rounds 2] [--out FILE]

- choices: one prompt, eight answers (`n=8`);
- lines: 16 calls behind one system prompt, as a batch job's lines or the users of one page have it.
The model is that of `prefix_caching.py`. Each case is asked three times, each time in words that were not there before.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from datetime import date
from pathlib import Path

import openai

from benchmarks.cpu_vs_vllm import cpu_name
from benchmarks.prefix_caching import NAME, make_chat_model, ours, vllm, words

NUM_TIMES = 3
NUM_CHOICES, NUM_LINES = 8, 16
# words of the system prompt and of each question, and tokens of each answer
SYSTEM, QUESTION, ANSWER = 100, 10, 4

# seconds until all is answered
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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--vllm-python")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path, help="write the result here as JSON")
    args = parser.parse_args()
    found: dict[str, list[dict[str, list[float]]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        model = Path(directory, "model")
        make_chat_model(model)
        for number in range(args.rounds):
            servers = {"ours": ours(model), "ours, without": ours(model, "--no-enable-prefix-caching")}
            if args.vllm_python:
                servers["vLLM"] = vllm(args.vllm_python, model)
                servers["vLLM, without"] = vllm(args.vllm_python, model, "--no-enable-prefix-caching")
            for name, server in servers.items():
                with server as url:
                    # warm, with other words
                    asyncio.run(measure(url, seed=1000 + number))
                    found.setdefault(name, []).append(asyncio.run(measure(url, seed=number)))
                print(line_of(f"{name}, round {number}", found[name][-1:]), flush=True)
    for name, rounds in found.items():
        print(line_of(name, rounds))
    if args.out:
        command = " ".join(["python -m benchmarks.prefix_bursts", *sys.argv[1:]])
        result = {
            "date": str(date.today()),
            "command": command.replace(str(args.vllm_python), "VENV/bin/python"),
            "cpu": cpu_name(),
            "num_cores": os.cpu_count(),
            "seconds": found,
        }
        args.out.write_text(json.dumps(result) + "\n")


def line_of(name: str, rounds: list[dict[str, list[float]]]) -> str:
    medians = (
        f"{case} {statistics.median(second for each in rounds for second in each[case]) * 1e3:7.0f}"
        for case in CASES
    )
    return f"{name:26} until all is answered, median, ms: {'  '.join(medians)}"


if __name__ == "__main__":
    main()
