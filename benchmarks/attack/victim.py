"""A well-behaved client that a server must keep serving.

It makes one long real-time call after another and polls /health.
It runs in its own process, so that the load of an attack's client doesn't affect it:

    python -m benchmarks.attack.victim URL [KEY]

It reads lines: `begin` discards the observations so far, `end` prints those made since then, as JSON.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from dataclasses import asdict
from typing import Any

import httpx2

from benchmarks.attack.verdict import Watched

POLL_S = 0.02
TIMEOUT_S = 30.0
QUESTION = {
    "model": "demo",
    "messages": [{"role": "user", "content": "Count from 1 to 21."}],
    "max_tokens": 300,
    "temperature": 0,
    # A token without text would not be received.
    "ignore_eos": True,
    "skip_special_tokens": False,
    "service_tier": "priority",
    "stream": True,
}


class Eyes:
    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self.silence_s = self.health_s = 0.0
        self.num_tokens = self.num_unwell = 0
        self.wrong: list[str] = []

    @property
    def seen(self) -> Watched:
        return Watched(self.silence_s, self.health_s, self.num_tokens, self.num_unwell, self.wrong)


class Victim:
    def __init__(self, url: str, key: str | None) -> None:
        self._http = httpx2.AsyncClient(
            base_url=url, timeout=TIMEOUT_S, headers={"Authorization": f"Bearer {key}"} if key else {}
        )
        self._eyes = Eyes()
        # The time it has been waiting for a token or an answer since. Reports include a wait that has not ended.
        self._waiting_since = {"stream": 0.0, "health": 0.0}
        self._expected = ""

    async def run(self) -> None:
        self._expected = await self._answer()
        self._eyes.forget()
        print("ready", flush=True)
        going_on = [asyncio.create_task(each) for each in (self._ask(), self._look())]
        try:
            while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
                if line == "begin":
                    self._begin()
                else:
                    print(json.dumps(asdict(self._end())), flush=True)
        finally:
            for task in going_on:
                task.cancel()

    def _begin(self) -> None:
        now = time.monotonic()
        self._waiting_since = dict.fromkeys(self._waiting_since, now)
        self._eyes.forget()

    def _end(self) -> Watched:
        now, eyes = time.monotonic(), self._eyes
        eyes.silence_s = max(eyes.silence_s, now - self._waiting_since["stream"])
        eyes.health_s = max(eyes.health_s, now - self._waiting_since["health"])
        return eyes.seen

    async def _ask(self) -> None:
        while True:
            try:
                said = await self._answer()
                if said != self._expected:
                    self._eyes.wrong.append(f"a stream said {said[-60:]!r} at its end")
            except (httpx2.HTTPError, ValueError) as error:
                self._eyes.wrong.append(f"a stream broke: {type(error).__name__} {error}"[:300])
                await asyncio.sleep(0.2)

    async def _answer(self) -> str:
        """Raises ValueError if the answer is incomplete."""
        self._waiting_since["stream"] = time.monotonic()
        pieces: list[str] = []
        async with self._http.stream("POST", "/v1/chat/completions", json=QUESTION) as response:
            if response.status_code != 200:
                raise ValueError(f"{response.status_code} {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    pieces.append(_text_of(json.loads(line[6:])))
                    self._heard()
                elif line == "data: [DONE]":
                    return "".join(pieces)
        raise ValueError("it ended without [DONE]")

    def _heard(self) -> None:
        now, eyes = time.monotonic(), self._eyes
        eyes.num_tokens += 1
        eyes.silence_s = max(eyes.silence_s, now - self._waiting_since["stream"])
        self._waiting_since["stream"] = now

    async def _look(self) -> None:
        while True:
            self._waiting_since["health"] = time.monotonic()
            status = 0
            try:
                status = (await self._http.get("/health")).status_code
            except httpx2.HTTPError:
                await asyncio.sleep(POLL_S)
            self._eyes.num_unwell += status != 200
            took_s = time.monotonic() - self._waiting_since["health"]
            self._eyes.health_s = max(self._eyes.health_s, took_s)
            await asyncio.sleep(POLL_S)
            self._waiting_since["health"] = time.monotonic()


def _text_of(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise ValueError(f"{chunk['error']}")
    return "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])


class Watch:
    """The harness's interface to the victim."""

    def __init__(self, url: str, key: str | None) -> None:
        """Raises RuntimeError if the server doesn't answer the victim."""
        command = [sys.executable, "-m", "benchmarks.attack.victim", url, *([key] if key else [])]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        if self._read() != "ready":
            raise RuntimeError("the victim has no answer even without an attack")

    def begin(self) -> None:
        self._write("begin")

    def end(self) -> Watched:
        self._write("end")
        return Watched(**json.loads(self._read()))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()

    def _write(self, line: str) -> None:
        assert self._process.stdin
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline().strip()


if __name__ == "__main__":
    asyncio.run(Victim(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None).run())
