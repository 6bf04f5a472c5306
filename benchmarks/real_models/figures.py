"""Measures one server that is up. All requests go to the completions API, as token ids."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from statistics import median
from typing import Any

import httpx2

from alignedserve.bench.client import Client, RequestOutcome
from alignedserve.bench.config import BenchConfig
from alignedserve.bench.results import summaries, times_of
from alignedserve.bench.run import http_client
from alignedserve.bench.workload import Item, arrival_times
from alignedserve.demo.words import any_word
from alignedserve.text.tokenizer import Tokenizer
from benchmarks.real_models.quiet import Quiet
from benchmarks.real_models.servers import NAME

# Tokens of a prompt, and how many prompts of this length are sent, one after the other.
PROMPTS = {30: 5, 500: 3, 4000: 1}
STREAMS = (1, 4, 8, 32)
STREAM_PROMPT, ANSWER = 32, 64
# Prompt tokens of chats and of best effort, and output tokens of the latter. These differ, so that no two end at once
# by design.
CHAT_PROMPT, LINE_ANSWERS = 128, (32, 96)
NUM_LINES = 16
CHATS_PER_S = 1.0
TIMEOUT_S = 300.0
Figures = dict[str, float]


class Prompts:
    """Makes prompts that no other prompt begins with."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)

    def item(self, length: int, num_tokens: int, tier: str = "rt", due_s: float = 0.0) -> Item:
        # A word is at least a token.
        text = " ".join(any_word(self._rng) for _ in range(length))
        ids = self._tokenizer.encode(text, add_special_tokens=False)[:length]
        return Item(due_s, tier, ids, num_tokens, length)

    def items(self, count: int, length: int, num_tokens: int) -> list[Item]:
        return [self.item(length, num_tokens) for _ in range(count)]

    def lines(self) -> Iterator[Item]:
        while True:
            yield self.item(CHAT_PROMPT, self._rng.randint(*LINE_ANSWERS), "be")


class Connection:
    """Sends requests to one server."""

    def __init__(self, http: httpx2.AsyncClient, url: str, has_tiers: bool) -> None:
        self._http = http
        self._settings: dict[str, Any] = {
            **{"base_url": url, "backend": "openai", "temperature": 0.0, "ignore_eos": True},
            # Whether requests have a tier at all.
            **{"be_share": float(has_tiers), "request_timeout_s": TIMEOUT_S},
        }

    async def ask(self, items: list[Item], at_once: int | None = None) -> tuple[list[RequestOutcome], float]:
        """Returns the outcomes and the seconds it took. Raises RuntimeError if an answer is not complete."""
        client = Client(BenchConfig(**self._settings, max_concurrency=at_once), self._http, NAME)
        outcomes, took_s = await client.run(items)
        for item, outcome in zip(items, outcomes, strict=True):
            check(item, outcome)
        return outcomes, took_s

    @asynccontextmanager
    async def job(self, lines: Iterator[Item]) -> AsyncIterator[Job]:
        """Keeps lines in flight."""
        job = Job(BenchConfig(**self._settings), self._http, NAME)
        tasks = [asyncio.create_task(job.keep(lines)) for _ in range(NUM_LINES)]
        try:
            yield job
        finally:
            for task in tasks:
                task.cancel()
            errors = await asyncio.gather(*tasks, return_exceptions=True)
        if failed := [each for each in errors if not isinstance(each, asyncio.CancelledError)]:
            raise RuntimeError(f"best effort: {failed[0]}")


class Job(Client):
    """Best effort. Counts pieces of answers as they arrive: most lines of a short window begin or end outside it."""

    num_pieces = 0
    whole: list[RequestOutcome]

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.whole = []

    async def keep(self, lines: Iterator[Item]) -> None:
        for line in lines:
            outcome = await self._ask(line)
            check(line, outcome)
            self.whole.append(outcome)

    def _take(self, event: bytes, outcome: RequestOutcome) -> str | None:
        before = len(outcome.times_s)
        error = super()._take(event, outcome)
        self.num_pieces += len(outcome.times_s) - before
        return error

    @property
    def tokens_per_piece(self) -> float:
        return sum(each.output_len for each in self.whole) / sum(len(each.times_s) for each in self.whole)


def check(item: Item, outcome: RequestOutcome) -> None:
    """Raises RuntimeError unless the prompt and the answer have the tokens that they should."""
    found = (outcome.prompt_len, outcome.output_len)
    if outcome.error or not outcome.times_s or found != (item.prompt_len, item.max_tokens):
        asked = (item.prompt_len, item.max_tokens)
        raise RuntimeError(f"{outcome.error}: {found} tokens of prompt and answer, {asked} were asked for")


async def measure(
    url: str, has_tiers: bool, prompts: Prompts, parts: list[str], max_len: int, chats_s: float, quiet: Quiet
) -> Figures:
    found: Figures = {}
    async with http_client(TIMEOUT_S, None) as http:
        connection = Connection(http, url, has_tiers)
        await connection.ask(prompts.items(4, STREAM_PROMPT, 8))
        for unit in _units(connection, prompts, parts, max_len, chats_s):
            found |= await quiet.measured(unit)
    both = [name for name in found if name.startswith("beside_")]
    return found | {
        name.replace("beside", "ratio"): found[name] / found[name.replace("beside", "alone")] for name in both
    }


def _units(
    connection: Connection, prompts: Prompts, parts: list[str], max_len: int, chats_s: float
) -> Iterator[Callable[[], Awaitable[Figures]]]:
    """Yields what is measured without a pause."""
    if "prompts" in parts:
        for length in PROMPTS:
            if length + 8 <= max_len:
                yield partial(first_tokens, connection, prompts, length)
    if "streams" in parts:
        for count in STREAMS:
            yield partial(streams, connection, prompts, count)
    if "chats" in parts:
        yield partial(chats_alone, connection, prompts, chats_s)
        yield partial(chats_beside, connection, prompts, chats_s)


async def first_tokens(connection: Connection, prompts: Prompts, length: int) -> Figures:
    outcomes, _ = await connection.ask(prompts.items(PROMPTS[length], length, 4), at_once=1)
    ttft_s = median(times_of(each).ttft for each in outcomes)
    return {f"ttft_s_{length}": ttft_s, f"prompt_rate_{length}": length / ttft_s}


async def streams(connection: Connection, prompts: Prompts, count: int) -> Figures:
    num_requests = max(count, 3)
    outcomes, took_s = await connection.ask(prompts.items(num_requests, STREAM_PROMPT, ANSWER), at_once=count)
    paces = [1 / times_of(each).tpot for each in outcomes]
    return {f"rate_{count}": num_requests * ANSWER / took_s, f"pace_{count}": count * median(paces)}


async def chats_alone(connection: Connection, prompts: Prompts, seconds: float) -> Figures:
    outcomes, _ = await connection.ask(chats(prompts, seconds))
    return latencies(outcomes, "alone")


async def chats_beside(connection: Connection, prompts: Prompts, seconds: float) -> Figures:
    async with connection.job(prompts.lines()) as job:
        while len(job.whole) < NUM_LINES:
            await asyncio.sleep(0.1)
        before = job.num_pieces
        outcomes, took_s = await connection.ask(chats(prompts, seconds))
        rate = (job.num_pieces - before) * job.tokens_per_piece / took_s
    return latencies(outcomes, "beside") | {"job_rate": rate}


def chats(prompts: Prompts, seconds: float) -> list[Item]:
    """Returns chats at the same times in every run."""
    times_s = arrival_times(round(CHATS_PER_S * seconds), CHATS_PER_S, 1.0, random.Random(1))
    return [prompts.item(CHAT_PROMPT, ANSWER, due_s=time_s) for time_s in times_s]


def latencies(outcomes: list[RequestOutcome], where: str) -> Figures:
    """Returns seconds: to the first token, and between two pieces of an answer."""
    found = summaries(outcomes, (50.0, 99.0))
    ttft, gap = (dict(found[name].percentiles) for name in ("ttft", "itl"))
    named = {"ttft_p50_s": ttft[50] / 1e3, "ttft_p99_s": ttft[99] / 1e3, "gap_p99_s": gap[99] / 1e3}
    return {f"{where}_{name}": value for name, value in named.items()}
