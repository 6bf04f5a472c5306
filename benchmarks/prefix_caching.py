"""Measures time to first token in chats that grow by turns, with and without prefix caching, and on vLLM for CPU.

    python -m benchmarks.prefix_caching [--vllm-python VENV/bin/python] [--rounds 2] [--out FILE]

All chats have the same system prompt. The servers run in turn. The model is a random-weight Llama with 76M parameters
in bfloat16, with the demo model's tokenizer and chat template. As in a real chat, the next turn's prompt contains the
model's answer.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import openai
from openai.types.chat import ChatCompletionMessageParam

from alignedserve import demo
from alignedserve.demo.words import any_word
from alignedserve.launch.ports import free_port
from benchmarks.cpu_vs_vllm import make_model
from benchmarks.harness import JSON_FILE, facts, in_turn, parser_of, progress, say, write_json
from benchmarks.rt_with_be.served import running

HOST, NAME = "127.0.0.1", "chat"
NUM_CHATS, NUM_TURNS, AT_ONCE = 8, 6, 2
# Words of the system prompt and of each question, and tokens per answer.
SYSTEM, QUESTION, ANSWER = 120, 20, 48
LIMITS = ("--max-model-len", "4096", "--max-num-seqs", "16")
# Seconds; both servers first measure or compile something.
START_S = 600.0
PEER_ENVIRONMENT = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}

# Per turn, per chat: seconds to the first token.
Waited = list[list[float]]
Measured = TypeVar("Measured")
# Starts a server, and yields the URL of its API.
Server = Callable[[], AbstractContextManager[str]]


def make_chat_model(directory: Path) -> None:
    given = json.loads((demo.MODEL_DIR / "config.json").read_text())
    make_model(directory, vocab_size=given["vocab_size"], eos_token_id=given["eos_token_id"])
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo.MODEL_DIR / name, directory)


@contextmanager
def ours(model: Path, *options: str, checkout: Path | None = None) -> Iterator[str]:
    """`checkout`: another checkout of this project."""
    port = free_port(HOST)
    with tempfile.TemporaryDirectory(prefix="state-", dir="/tmp", ignore_cleanup_errors=True) as state:
        command = [sys.executable, "-m", "alignedserve", "serve", str(model), "--served-model-name", NAME]
        command += ["--host", HOST, "--port", str(port), "--state-dir", state, "--device", "cpu"]
        command += [*LIMITS, *options]
        # Python looks for modules in its working directory first.
        with running(command, Path(state) / "log", "ready after", START_S, folder=checkout):
            yield f"http://{HOST}:{port}/v1"


@contextmanager
def vllm(python: str, model: Path, *options: str) -> Iterator[str]:
    port = free_port(HOST)
    with tempfile.TemporaryDirectory(prefix="peer-", dir="/tmp", ignore_cleanup_errors=True) as state:
        command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += ["--served-model-name", NAME, "--host", HOST, "--port", str(port)]
        log, ready = Path(state) / "log", "Application startup complete"
        with running([*command, *LIMITS, *options], log, ready, START_S, PEER_ENVIRONMENT):
            yield f"http://{HOST}:{port}/v1"


async def chats(url: str, seed: int) -> Waited:
    dice = random.Random(seed)
    system: ChatCompletionMessageParam = {"role": "system", "content": words(SYSTEM, dice)}
    questions = [[words(QUESTION, dice) for _ in range(NUM_TURNS)] for _ in range(NUM_CHATS)]
    waited: Waited = [[] for _ in range(NUM_TURNS)]
    turn = asyncio.Semaphore(AT_ONCE)
    async with openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0) as client:

        async def chat(asked: list[str]) -> None:
            messages: list[ChatCompletionMessageParam] = [system]
            async with turn:
                for number, question in enumerate(asked):
                    messages.append({"role": "user", "content": question})
                    ttft_s, answer = await ask(client, messages)
                    waited[number].append(ttft_s)
                    messages.append({"role": "assistant", "content": answer})

        await asyncio.gather(*(chat(asked) for asked in questions))
    return waited


def words(count: int, dice: random.Random) -> str:
    return " ".join(any_word(dice) for _ in range(count))


async def ask(client: openai.AsyncOpenAI, messages: list[ChatCompletionMessageParam]) -> tuple[float, str]:
    begun_s, first_s, answer = time.perf_counter(), 0.0, ""
    stream = await client.chat.completions.create(
        model=NAME,
        messages=messages,
        temperature=0,
        max_tokens=ANSWER,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    async for chunk in stream:
        if text := chunk.choices[0].delta.content:
            first_s = first_s or time.perf_counter()
            answer += text
    return first_s - begun_s, answer


def main() -> None:
    parser = parser_of(__doc__, rounds=2, out=JSON_FILE)
    parser.add_argument("--vllm-python")
    compare_servers(parser.parse_args(), chats, line_of, "ttft_s")


def compare_servers(
    args: Namespace,
    measure: Callable[[str, int], Coroutine[Any, Any, Measured]],
    line_of: Callable[[str, list[Measured]], str],
    unit: str,
) -> None:
    """Measures each server in each round. `measure`: a function of a URL and a seed."""

    def run(server: Server, numbers: Iterator[int]) -> Measured:
        number = next(numbers)
        with server() as url:
            # Other words than in the measurement.
            asyncio.run(measure(url, 1000 + number))
            return asyncio.run(measure(url, number))

    with tempfile.TemporaryDirectory() as directory, progress(None, "server") as bar:
        model = Path(directory, "model")
        bar.set_description("making the model")
        make_chat_model(model)
        servers = servers_of(model, args.vllm_python)
        bar.total = args.rounds * len(servers)
        runs = {name: partial(run, server, itertools.count()) for name, server in servers.items()}
        found = in_turn(runs, args.rounds, bar=bar, told=lambda name, one: say(line_of(name, [one])))
    for name, rounds in found.items():
        print(line_of(name, rounds))
    write_json(args.out, facts({args.vllm_python: "VENV/bin/python"}) | {unit: found})


def servers_of(model: Path, vllm_python: str | None) -> dict[str, Server]:
    off = "--no-enable-prefix-caching"
    servers: dict[str, Server] = {"ours": partial(ours, model), "ours, without": partial(ours, model, off)}
    if vllm_python:
        peer = partial(vllm, vllm_python, model)
        servers |= {"vLLM": peer, "vLLM, without": partial(peer, off)}
    return servers


def line_of(name: str, rounds: list[Waited]) -> str:
    by_turn = [[each for waited in turns for each in waited] for turns in zip(*rounds, strict=True)]
    medians = "  ".join(f"{statistics.median(waited) * 1e3:6.1f}" for waited in by_turn)
    return f"{name:26} TTFT by turn, median, ms: {medians}"


if __name__ == "__main__":
    main()
