"""The load on a server: short chats with objectives, and one batch job of long lines. Determined by a seed."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx2

from alignedserve.bench.client import Client, RequestOutcome
from alignedserve.bench.config import BenchConfig
from alignedserve.bench.workload import Item
from alignedserve.demo.words import any_word

MODEL = "demo"
ENDPOINT = "/v1/chat/completions"
MIN_OUTPUT, MAX_OUTPUT = 32, 64
# Words of a line's prompt: about 200 to 600 of the demo model's tokens.
MIN_WORDS, MAX_WORDS = 40, 100
# Different lengths, so that they do not all end at once.
MIN_BE_OUTPUT, MAX_BE_OUTPUT = 100, 300
OVER = ("completed", "cancelled", "failed", "expired")
LOOK_S = 0.1


@dataclass(frozen=True)
class Traffic:
    """The load: (rate, seconds, coefficient of variation, seed) -> chats; count -> lines of a job."""

    chats: Callable[[float, float, float, int], list[Item]]
    lines: Callable[[int], dict[str, dict[str, Any]]]


# ---- real time ------------------------------------------------------------------------------------------------------


def chats(rate: float, seconds: float, cv: float, seed: int) -> list[Item]:
    """Returns chats. Counting takes longer than any of their limits."""
    dice = random.Random(seed)
    items = []
    for time_s in arrivals(dice, rate, seconds, cv):
        first = dice.randint(100, 900)
        question = [{"role": "user", "content": f"Count from {first} to {first + 20}."}]
        items.append(Item(time_s, "rt", question, dice.randint(MIN_OUTPUT, MAX_OUTPUT), prompt_len=0))
    return items


def arrivals(dice: random.Random, rate: float, seconds: float, cv: float) -> Iterator[float]:
    time_s, shape = 0.0, 1 / cv**2
    while (time_s := time_s + dice.gammavariate(shape, 1 / (rate * shape))) < seconds:
        yield time_s


def ask(
    url: str, items: Sequence[Item], headers: Mapping[str, str], client: type[Client] = Client
) -> tuple[list[RequestOutcome], float]:
    """Sends the items when they are due. Returns the outcomes and the seconds it took."""
    return asyncio.run(_ask(url, items, headers, client))


async def _ask(
    url: str, items: Sequence[Item], headers: Mapping[str, str], client: type[Client]
) -> tuple[list[RequestOutcome], float]:
    config = BenchConfig(base_url=url, backend="openai-chat", temperature=0.0)
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=64)
    async with httpx2.AsyncClient(headers=headers, limits=limits, timeout=None) as http:
        await http.get(url + "/health")
        return await client(config, http, MODEL).run(items)


# ---- best effort ----------------------------------------------------------------------------------------------------


def lines(count: int, seed: int = 0) -> dict[str, dict[str, Any]]:
    """Returns custom_id -> body: questions about long lists, with long answers."""
    dice, asked = random.Random(seed), {}
    for number in range(count):
        words = [any_word(dice) for _ in range(dice.randint(MIN_WORDS, MAX_WORDS))]
        listed = ", ".join(f"{place} {word}" for place, word in enumerate(words, start=1))
        question = f"Here is a list: {listed}. Which word is number {dice.randint(1, len(words))}?"
        asked[f"line-{number}"] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": dice.randint(MIN_BE_OUTPUT, MAX_BE_OUTPUT),
            "ignore_eos": True,
        }
    return asked


class Job:
    def __init__(
        self,
        http: httpx2.Client,
        asked: Mapping[str, dict[str, Any]],
        window: str = "24h",
        endpoint: str = ENDPOINT,
    ) -> None:
        self._http = http
        content = "\n".join(
            json.dumps({"custom_id": name, "method": "POST", "url": endpoint, "body": body})
            for name, body in asked.items()
        )
        file = self._post("/v1/files", files={"file": ("in.jsonl", content)}, data={"purpose": "batch"})
        asked_for = {"input_file_id": file["id"], "endpoint": endpoint, "completion_window": window}
        self.id = self._post("/v1/batches", json=asked_for)["id"]

    def _post(self, path: str, **what: Any) -> dict[str, Any]:
        answer = self._http.post(path, **what)
        if answer.status_code != 200:
            raise RuntimeError(f"{path}: HTTP {answer.status_code}: {answer.text[:500]}")
        return answer.json()  # type: ignore[no-any-return]

    def look(self) -> dict[str, Any]:
        return self._http.get(f"/v1/batches/{self.id}").raise_for_status().json()  # type: ignore[no-any-return]

    def counts(self) -> dict[str, int]:
        return self.look()["request_counts"]  # type: ignore[no-any-return]

    def cancel(self) -> None:
        self._post(f"/v1/batches/{self.id}/cancel")
        self.until_over()

    def until_over(self, timeout_s: float = 600.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while (batch := self.look())["status"] not in OVER:
            if time.monotonic() > deadline:
                raise RuntimeError(f"after {timeout_s} s the job is {batch}")
            time.sleep(LOOK_S)
        return batch

    def answers(self) -> dict[str, dict[str, Any]]:
        """Returns custom_id -> text and usage of the answer. Raises RuntimeError for a line that was not answered."""
        batch = self.until_over()
        if batch["status"] != "completed" or batch["error_file_id"]:
            raise RuntimeError(f"the job has not been answered entirely: {batch}")
        text = self._http.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text
        return dict(_answer(json.loads(line)) for line in text.splitlines())


def _answer(line: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    body = line["response"]["body"]
    usage = body["usage"]
    return line["custom_id"], {
        "text": body["choices"][0]["message"]["content"],
        "prompt_len": usage["prompt_tokens"],
        "output_len": usage["completion_tokens"],
    }


DEMO = Traffic(chats, lines)
