"""Measures the savings of the direct hand-over from prefill to decode instances, live.

These are the time from the first to the second token of real time, and bytes from and to the pool's memory.
`simulated.py` measures the same for larger hardware.

    python -m benchmarks.hand_over.live [--beside DIR] [--requests N] [--rounds N] [--prompt-tokens N]
                                        [--best-effort N] [--out FILE] [-- OPTIONS OF alignedserve serve]

Each round starts a server of this checkout; with --beside, also one of the checkout in DIR, so that they take turns
(A B A B). It requests answers of a few tokens to different prompts, one after the other, beside a constant number of
best-effort requests, and reads the copied bytes from `/metrics`.

For each round it prints the median and the 99th percentile of the time between the first two tokens, in milliseconds.
It also prints the KiB per real-time request that were saved to the pool, loaded from it, and pulled between instances.
These include the copies of best effort. Without options after `--` the link is ipc.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2

from alignedserve.launch.ports import free_port
from benchmarks.harness import JSON_FILE, ROOT, parser_of, write_json
from benchmarks.rt_with_be.served import running

COPIES = ("save", "load", "pull")
MOVED = re.compile(r'^alignedserve:kv_transfer_bytes_total\{.*transfer="(\w+)"\} (\S+)$', re.MULTILINE)
HANDED_OVER = re.compile(r"^alignedserve:num_handed_over_total\{.*\} (\S+)$", re.MULTILINE)
# Token ids that every model has, none of which ends an answer.
TOKENS = range(20, 50)
READY_S = 300.0


@dataclass
class Round:
    checkout: str
    median_ms: float
    p99_ms: float
    # KiB of each kind of copy, per real-time request.
    kib: dict[str, float]
    # Real-time requests that were handed over directly.
    num_handed_over: int
    num_requests: int

    def line(self) -> str:
        copies = "  ".join(f"{what} {self.kib[what]:8.1f}" for what in COPIES)
        direct = f"{self.num_handed_over} of {self.num_requests} handed over"
        return f"{self.checkout:24} p50 {self.median_ms:7.2f} ms  p99 {self.p99_ms:7.2f} ms   KiB: {copies}   {direct}"


@contextmanager
def server(checkout: Path, options: Sequence[str]) -> Iterator[str]:
    """Runs a server of that checkout, with its own interpreter if it has one."""
    own = checkout / ".venv" / "bin" / "python"
    port = free_port("127.0.0.1")
    with tempfile.TemporaryDirectory(dir="/tmp") as state:
        command = [str(own if own.exists() else sys.executable), "-m", "alignedserve", "serve", *options]
        command += ["--port", str(port), "--state-dir", state]
        with running(command, Path(state) / "log", "ready after", READY_S, folder=checkout):
            yield f"http://127.0.0.1:{port}"


class Client:
    def __init__(self, http: httpx2.AsyncClient, model: str, dice: random.Random, num_tokens: int) -> None:
        self._http = http
        self._model = model
        self._dice = dice
        self._num_tokens = num_tokens

    def _body(self, max_tokens: int, tier: str) -> dict[str, object]:
        prompt = self._dice.choices(TOKENS, k=self._num_tokens)
        body = {"model": self._model, "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        return body | {"stream": True, "service_tier": tier}

    async def gap_s(self, max_tokens: int) -> float:
        """Sends a real-time request. Returns the seconds between the first and the second token."""
        times_s = []
        async with self._http.stream(
            "POST", "/v1/completions", json=self._body(max_tokens, "default")
        ) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    times_s.append(time.perf_counter())
        return times_s[1] - times_s[0]

    async def keep_asking(self) -> None:
        """Sends best-effort requests, one after the other."""
        while True:
            body = self._body(64, "flex") | {"stream": False}
            (await self._http.post("/v1/completions", json=body)).raise_for_status()


async def measure(url: str, args: Namespace, name: str) -> Round:
    async with httpx2.AsyncClient(base_url=url, timeout=120) as http:
        model = (await http.get("/v1/models")).json()["data"][0]["id"]
        client = Client(http, model, random.Random(args.seed), args.prompt_tokens)
        others = [asyncio.create_task(client.keep_asking()) for _ in range(args.best_effort)]
        try:
            for _ in range(args.requests // 10):
                await client.gap_s(args.max_tokens)
            before = await _metrics(http)
            gaps_ms = [1000 * await client.gap_s(args.max_tokens) for _ in range(args.requests)]
            after = await _metrics(http)
        finally:
            for other in others:
                other.cancel()
            await asyncio.gather(*others, return_exceptions=True)
    found = {what: after[what] - before[what] for what in before}
    return Round(
        name,
        statistics.median(gaps_ms),
        sorted(gaps_ms)[int(0.99 * len(gaps_ms))],
        {what: found[what] / 1024 / args.requests for what in COPIES},
        int(found["handed over"]),
        args.requests,
    )


async def _metrics(http: httpx2.AsyncClient) -> dict[str, float]:
    """Returns the bytes of all copies by kind, and the number of requests that were handed over."""
    await asyncio.sleep(0.5)  # By then, the last copies are in a report.
    text = (await http.get("/metrics")).text
    found = dict.fromkeys(COPIES, 0.0)
    for what, num_bytes in MOVED.findall(text):
        found[what] = found.get(what, 0.0) + float(num_bytes)
    return found | {"handed over": sum(map(float, HANDED_OVER.findall(text)))}


def main() -> None:
    parser = parser_of(__doc__, rounds=2, out=JSON_FILE)
    parser.add_argument("--beside", type=Path, metavar="DIR", help="another checkout, for every second round")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--prompt-tokens", type=int, default=150)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument(
        "--best-effort", type=int, default=0, help="number of best-effort requests that run all the time"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("serve", nargs="*", help="options of alignedserve serve, after --")
    args = parser.parse_args()
    checkouts = {"here": ROOT} | ({str(args.beside.name): args.beside.resolve()} if args.beside else {})
    rounds = []
    for _ in range(args.rounds):
        for name, checkout in checkouts.items():
            with server(checkout, args.serve or ["--link", "ipc"]) as url:
                rounds.append(asyncio.run(measure(url, args, name)))
            print(rounds[-1].line(), flush=True)
    write_json(args.out, rounds)


if __name__ == "__main__":
    main()
