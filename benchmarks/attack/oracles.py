"""What one key can learn about another's calls, or teach the server about them, through what the server remembers."""

from __future__ import annotations

import asyncio
import re
import time
from random import Random
from typing import Any

import httpx2

from benchmarks.attack.target import KEYS, NEWCOMER, OPERATOR, Finding, Target

NEEDS_KEYS = True
ATTACKER, VICTIM = KEYS
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
NUM_PROMPTS = 15
# Sources of a predicted length that were learned from answers.
LEARNED = ("neighbours", "regression", "class")
# Pairs of schemas, and how many of them may be told apart: guessing gives 12 or 13, give or take 2.5.
NUM_PAIRS, MAX_RIGHT = 25, 20
NUM_CHATS, CHAT_TOKENS, NUM_PROMPTS_OF_FLOOD, FLOOD_TOKENS, ANSWER_TOKENS = 8, 416, 64, 1500, 20


def _client(target: Target, key: str) -> httpx2.AsyncClient:
    headers = {"Authorization": f"Bearer {key}"}
    return httpx2.AsyncClient(base_url=target.url, timeout=30 * target.slack, headers=headers)


async def attack_counters_of_all(target: Target) -> Finding:
    """Their sums, read often, have the lengths of each call of others."""
    async with _client(target, NEWCOMER) as http:
        statuses = {path: (await http.get(path)).status_code for path in ("/metrics", "/v1/cluster")}
    return Finding("counters of all keys", set(statuses.values()) == {403}, str(statuses))


async def attack_predicted_lengths(target: Target) -> Finding:
    """Sends another key's prompts, and hangs up. An operator sees whether they were recognised, as that key's are."""
    prompts = [_prompt(number) for number in range(NUM_PROMPTS)]
    async with _client(target, VICTIM) as victim, _client(target, NEWCOMER) as newcomer:
        for prompt in prompts:
            await victim.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 16, "temperature": 0})
        unknown = await _recognised(target)
        for prompt in prompts:
            await victim.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 16, "temperature": 0})
        before = await _recognised(target)
        for prompt in prompts:
            # It is not over when it is dropped, so that nothing is learned from it.
            body = {"prompt": prompt, "min_tokens": 300, "max_tokens": 400, "stream": True}
            async with newcomer.stream("POST", COMPLETIONS, json=body) as answer:
                await anext(answer.aiter_bytes(), b"")
        found = await _recognised(target) - before
    num_own = before - unknown
    detail = f"{found:.0f} of {NUM_PROMPTS} recognised, {num_own:.0f} when their own key repeats them"
    return Finding("lengths of another key's answers", found == 0 < num_own, detail)


async def attack_taught_lengths(target: Target) -> Finding:
    """Repeats another key's prompt with answers that end at once."""
    messages = [{"role": "user", "content": "Count from 1 to 9."}]
    asked = {"messages": messages, "max_tokens": 64, "temperature": 0}
    cut = asked | {"stop_token_ids": list(range(384))}
    async with _client(target, VICTIM) as victim, _client(target, ATTACKER) as attacker:
        for _ in range(6):
            await victim.post(CHAT, json=asked)
        usual = await _error_of(target, victim, asked)
        for _ in range(12):
            await attacker.post(CHAT, json=cut)
        taught = await _error_of(target, victim, asked)
    held = taught <= usual + 0.1
    return Finding("lengths taught by another key", held, f"relative error {usual:.2f}, then {taught:.2f}")


async def attack_schemas_by_time(target: Target) -> Finding:
    """Sends a schema that another key has used and one that nobody has used, and guesses by time which is which."""
    random, num_right = Random(7), 0
    async with _client(target, VICTIM) as victim, _client(target, ATTACKER) as attacker:
        for number in range(NUM_PAIRS):
            used, unused = (_asked(f"{name}{number}") for name in ("used", "unused"))
            await victim.post(COMPLETIONS, json=used)
            pair = [used, unused]
            random.shuffle(pair)
            times = {}
            for body in pair:
                begun_s = time.monotonic()
                await attacker.post(COMPLETIONS, json=body)
                times[body is used] = time.monotonic() - begun_s
            num_right += times[True] < times[False]
    detail = f"{num_right} of {NUM_PAIRS} told by time"
    return Finding("schemas of another key", num_right <= MAX_RIGHT, detail)


async def attack_kept_kv(target: Target) -> Finding:
    """Sends more prompts than the pool can keep. Another key's chats must still be found there."""

    async def num_found(http: httpx2.AsyncClient) -> int:
        found = 0
        for number in range(NUM_CHATS):
            # A prompt is saved to the pool only if its answer has more than one token.
            body = {"prompt": _tokens(number, CHAT_TOKENS), "max_tokens": ANSWER_TOKENS, "ignore_eos": True}
            usage = (await http.post(COMPLETIONS, json=body)).json()["usage"]
            found += bool((usage.get("prompt_tokens_details") or {}).get("cached_tokens"))
        return found

    async with _client(target, VICTIM) as victim, _client(target, ATTACKER) as attacker:
        await num_found(victim)
        before = await num_found(victim)
        turns = asyncio.Semaphore(8)

        async def fill(number: int) -> None:
            async with turns:
                body = {"prompt": _tokens(1000 + number, FLOOD_TOKENS), "max_tokens": ANSWER_TOKENS}
                await attacker.post(COMPLETIONS, json=body)

        await asyncio.gather(*map(fill, range(NUM_PROMPTS_OF_FLOOD)))
        after = await num_found(victim)
    return Finding("another key's KV", before == after == NUM_CHATS, f"{before}, then {after} of {NUM_CHATS}")


# Its verdict depends on times alone.
TIMED = (attack_schemas_by_time,)


async def _error_of(target: Target, http: httpx2.AsyncClient, body: dict[str, Any]) -> float:
    """Returns the mean relative error of the predicted lengths of three calls, once it has as many samples."""
    names = [rf"alignedserve:length_prediction_relative_error_{each}\{{.*\}}" for each in ("sum", "count")]
    before = [await _sum(target, name) for name in names]
    for _ in range(3):
        await http.post(CHAT, json=body)
    while True:
        error, num_samples = [await _sum(target, name) - was for name, was in zip(names, before, strict=True)]
        # The stream of the client that watches may be among them.
        if num_samples >= 3:
            return error / num_samples
        await asyncio.sleep(0.05)


async def _recognised(target: Target) -> float:
    sources = "|".join(LEARNED)
    return await _sum(target, rf'alignedserve:length_predictions_total\{{.*source="({sources})".*\}}')


async def _sum(target: Target, pattern: str) -> float:
    """Returns the sum of the metrics that fit."""
    async with _client(target, OPERATOR) as http:
        lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(pattern, line))


def _asked(title: str) -> dict[str, Any]:
    properties = {f"{title}_{each}": {"type": "string", "maxLength": 9} for each in range(40)}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return {"prompt": "x", "max_tokens": 1, "structured_outputs": {"json": schema}}


def _prompt(number: int) -> str:
    return " ".join(Random(number).sample(["one", "two", "three", "four", "five", "six", "seven"], 6))


def _tokens(seed: int, count: int) -> list[int]:
    return Random(seed).choices(range(10, 300), k=count)
