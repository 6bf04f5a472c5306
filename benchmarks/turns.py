"""Measures chats of many turns behind a system prompt, on separate prefill and decode instances, or on colocated ones.

    python -m benchmarks.turns [--turns 10] [--answer 100] [--pause 0.5] [--instances 2+2] [--rounds 1]
        [--kill] [--before CHECKOUT] [--vllm-python VENV/bin/python] [--out FILE]

It reports the time to the first token from the second turn on, and the tokens of earlier turns that were computed
again. Servers run in turn. The model is that of `prefix_caching.py`. Prompts and answers are tokens, because no
tokenizer makes the same tokens of what random weights say. With `--kill`, all prefill and decode instances
are killed when half of the turns are over. `--before` also runs another checkout of this project.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import signal
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import httpx2
import openai

from benchmarks.harness import JSON_FILE, facts, in_turn, parser_of, progress, say, write_json
from benchmarks.prefix_caching import NAME, Server, make_chat_model, ours, vllm

NUM_CHATS, AT_ONCE = 8, 2
# Tokens of the system prompt and of each question.
SYSTEM, QUESTION = 400, 60
# Ordinary tokens of the demo model's vocabulary.
TOKENS = range(100, 380)


@dataclass
class Seen:
    # From the second turn on.
    ttfts_s: list[float] = field(default_factory=list)
    # Per turn, the tokens of earlier turns that were computed again. An answer's last token always is.
    again: list[int] = field(default_factory=list)


async def chats(url: str, seed: int, args: Namespace, kills: bool) -> Seen:
    dice, seen, turn = random.Random(seed), Seen(), asyncio.Semaphore(AT_ONCE)
    system = dice.choices(TOKENS, k=SYSTEM)
    asked = [[dice.choices(TOKENS, k=QUESTION) for _ in range(args.turns)] for _ in range(NUM_CHATS)]
    num_over = 0
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:

        async def chat(questions: list[list[int]]) -> None:
            nonlocal num_over
            said = [*system]
            async with turn:
                for number, question in enumerate(questions):
                    await asyncio.sleep(args.pause if number else 0.0)
                    num_before = len(said)
                    said += question
                    ttft_s, answer, num_cached = await ask(client, said, args.answer)
                    said += answer
                    if number:
                        seen.ttfts_s.append(ttft_s)
                        seen.again.append(num_before - num_cached)
                    num_over += 1
                    if kills and num_over == NUM_CHATS * args.turns // 2:
                        await asyncio.to_thread(kill_instances, url)

        await asyncio.gather(*(chat(questions) for questions in asked))
    return seen


async def ask(client: openai.AsyncOpenAI, prompt: list[int], num_tokens: int) -> tuple[float, list[int], int]:
    """Returns the seconds to the first token, the answer, and the number of cached tokens."""
    begun_s, first_s, answer, usage = time.perf_counter(), 0.0, list[int](), None
    stream = await client.completions.create(
        model=NAME,
        prompt=prompt,
        temperature=0,
        max_tokens=num_tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True, "return_token_ids": True},
    )
    async for chunk in stream:
        usage = chunk.usage or usage
        if chunk.choices and (tokens := (chunk.choices[0].model_extra or {}).get("token_ids")):
            first_s = first_s or time.perf_counter()
            answer += tokens
    details = usage.prompt_tokens_details if usage else None
    return first_s - begun_s, answer, (details.cached_tokens or 0) if details else 0


def kill_instances(url: str) -> None:
    for pid in pids_of_instances(url).values():
        os.kill(pid, signal.SIGKILL)


def pids_of_instances(url: str) -> dict[str, int]:
    """Returns the pid of each instance that is up, by its id."""
    cluster = httpx2.get(url.removesuffix("/v1") + "/v1/cluster", timeout=60).raise_for_status().json()
    return {
        process["instance_id"]: process["pid"]
        for process in cluster["processes"]
        if process["role"] in ("prefill", "decode", "colocated") and process["state"] == "up"
    }


def layout_options(instances: str) -> list[str]:
    """`instances`: prefill+decode instances, or colocated ones."""
    first, *others = instances.split("+")
    if not others:
        return ["--colocated-instances", first]
    return ["--prefill-instances", first, "--decode-instances", *others]


def servers_of(model: Path, args: Namespace) -> dict[str, Server]:
    options = layout_options(args.instances)
    servers: dict[str, Server] = {"ours": partial(ours, model, *options)}
    if args.before:
        servers["before"] = partial(ours, model, *options, checkout=args.before)
    if args.vllm_python:
        servers["vLLM"] = partial(vllm, args.vllm_python, model, "--enable-prompt-tokens-details")
    return servers


def measure(server: Server, args: Namespace, kills: bool, numbers: Iterator[int]) -> Seen:
    """`numbers`: those of the rounds."""
    number = next(numbers)
    with server() as url:
        # Other words than in the measurement.
        asyncio.run(chats(url, 1000 + number, args, kills=False))
        return asyncio.run(chats(url, number, args, kills))


def main() -> None:
    parser = parser_of(__doc__, rounds=1, out=JSON_FILE)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--answer", type=int, default=100, help="tokens of each answer")
    parser.add_argument(
        "--pause", type=float, default=0.5, help="seconds between an answer and the next turn"
    )
    parser.add_argument("--instances", default="2+2", help="prefill+decode instances, or colocated ones")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--before", type=Path)
    parser.add_argument("--vllm-python")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, progress(None, "server") as bar:
        model = Path(directory, "model")
        make_chat_model(model)
        runs = {
            name: partial(measure, server, args, args.kill and name != "vLLM", itertools.count())
            for name, server in servers_of(model, args).items()
        }
        found = in_turn(runs, args.rounds, bar=bar, told=lambda name, seen: say(line_of(name, [seen])))
    for name, rounds in found.items():
        print(line_of(name, rounds))
    hidden = {args.vllm_python: "VENV/bin/python", args.before: "CHECKOUT"}
    write_json(args.out, facts(hidden) | {"seen": found})


def line_of(name: str, rounds: list[Seen]) -> str:
    ttfts_s = sorted(each for seen in rounds for each in seen.ttfts_s)
    again = [each for seen in rounds for each in seen.again]
    return (
        f"{name:16} TTFT from the second turn on: p50 {1e3 * statistics.median(ttfts_s):.1f} ms, "
        f"p99 {1e3 * ttfts_s[int(0.99 * len(ttfts_s))]:.1f} ms; computed again: "
        f"{statistics.fmean(again):.1f} tokens a turn, at most {max(again)}"
    )


if __name__ == "__main__":
    main()
