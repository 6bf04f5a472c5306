"""Measures the error of batch jobs' estimates: runs jobs on its own server with the demo model, and polls them.

    python -m benchmarks.turnaround [--lines 1000] [--only CASE] [--out FILE]

For each job it prints the duration, and the errors of the estimates at a quarter, a half and three quarters of it, as
shares of the time that was then left. The cases are a single job, a job with growing lines, three jobs that begin
together, and a job beside bursts of chats.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from alignedserve.cli.own_server import own_server
from benchmarks.harness import JSON_FILE, facts, parser_of, write_json

CHATS = "/v1/chat/completions"
SHARES = (0.25, 0.5, 0.75)
POLL_S = 0.25
MAX_TOKENS = 48

Lines = list[dict[str, Any]]


def line(number: int, num_words: int, dice: random.Random) -> dict[str, Any]:
    text = " ".join(str(dice.randrange(100)) for _ in range(num_words))
    messages = [{"role": "user", "content": f"{number}: Sort {text}."}]
    body = {"messages": messages, "max_tokens": dice.randint(MAX_TOKENS // 2, MAX_TOKENS), "ignore_eos": True}
    return {"custom_id": str(number), "method": "POST", "url": CHATS, "body": body}


def alike(count: int, dice: random.Random) -> Lines:
    return [line(number, 10, dice) for number in range(count)]


def growing(count: int, dice: random.Random) -> Lines:
    return [line(number, 2 + 60 * number // count, dice) for number in range(count)]


async def job(http: httpx2.AsyncClient, lines: Lines) -> list[float]:
    """Returns the job's seconds, and the estimates' errors at each of SHARES."""
    content = b"".join(json.dumps(each).encode() + b"\n" for each in lines)
    file = await _ok(http.post("/v1/files", data={"purpose": "batch"}, files={"file": ("in.jsonl", content)}))
    asked = {"input_file_id": file["id"], "endpoint": CHATS, "completion_window": "24h"}
    batch = await _ok(http.post("/v1/batches", json=asked))
    begun_s = time.time()
    # (time, estimated completion at that time).
    said: list[tuple[float, float]] = []
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        await asyncio.sleep(POLL_S)
        batch = await _ok(http.get(f"/v1/batches/{batch['id']}"))
        if (at := batch["alignedserve"]["estimated_completion_at"]) is not None:
            said.append((time.time(), at))
    counts = batch["request_counts"]
    if counts["completed"] != len(lines):
        raise SystemExit(f"a job is {batch['status']}: {counts}")
    end_s = time.time()
    return [end_s - begun_s, *(_error(said, begun_s, end_s, share) for share in SHARES)]


def _error(said: Sequence[tuple[float, float]], begun_s: float, end_s: float, share: float) -> float:
    at_s = begun_s + share * (end_s - begun_s)
    asked_s, estimate_s = min(said, key=lambda each: abs(each[0] - at_s))
    return (estimate_s - end_s) / (end_s - asked_s)


async def _ok(call: Any) -> Any:
    answer = await call
    answer.raise_for_status()
    return answer.json()


async def bursts(http: httpx2.AsyncClient, dice: random.Random) -> None:
    """Alternates a few seconds with chats and a few without."""
    while True:
        for _ in range(20):
            body = line(0, 10, dice)["body"]
            await _ok(http.post(CHATS, json=body))
        await asyncio.sleep(5)


async def alone(http: httpx2.AsyncClient, count: int, make: Callable[[int, random.Random], Lines]) -> Any:
    return [await job(http, make(count, random.Random(1)))]


async def together(http: httpx2.AsyncClient, count: int) -> Any:
    sizes = (count, count // 2, count // 4)
    return await asyncio.gather(*(job(http, alike(size, random.Random(size))) for size in sizes))


async def beside_chats(http: httpx2.AsyncClient, count: int) -> Any:
    chats = asyncio.create_task(bursts(http, random.Random(2)))
    try:
        return [await job(http, alike(count, random.Random(3)))]
    finally:
        chats.cancel()


CASES: dict[str, Callable[[httpx2.AsyncClient, int], Any]] = {
    "alone": lambda http, count: alone(http, count, alike),
    "growing": lambda http, count: alone(http, count, growing),
    "together": together,
    "beside chats": beside_chats,
}


async def measure(url: str, count: int, only: str | None) -> dict[str, Any]:
    found = {}
    async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
        for name, case in CASES.items():
            if only in (None, name):
                found[name] = await case(http, count)
                for seconds, *errors in found[name]:
                    said = "  ".join(f"{error:+7.1%}" for error in errors)
                    print(f"{name:20} {seconds:6.1f} s   at 25, 50, 75 %: {said}", flush=True)
    return found


def main() -> None:
    parser = parser_of(__doc__, out=JSON_FILE)
    parser.add_argument("--lines", type=int, default=1000)
    parser.add_argument("--only", choices=CASES)
    args = parser.parse_args()
    with own_server([], lambda said: print(said, file=sys.stderr)) as url:
        found = asyncio.run(measure(url, args.lines, args.only))
    write_json(args.out, facts() | {"lines": args.lines, "cases": found})


if __name__ == "__main__":
    main()
