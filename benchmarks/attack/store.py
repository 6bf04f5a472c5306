"""Attacks with files and batch jobs: lines that are slow to parse, more jobs than allowed, a Redis that hangs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Sequence
from pathlib import Path
from typing import Any

import httpx2

from benchmarks.attack.target import Finding, Target

ENDPOINT = "/v1/chat/completions"
OVER = ("failed", "completed", "expired", "cancelled")
# The most seconds for one attack.
LIMIT_S = 10.0
# The most seconds until a hanging Redis is detected and restarted.
RESTART_S = 30.0
NUM_ITEMS = 1_800_000
NUM_JOBS = 300


async def attack_line_of_a_million_items(target: Target) -> Finding:
    """Checks that the line gets one error."""
    name = "batch: a line of 1.8 million messages"
    async with _client(target) as client:
        body = b'{"model": ' + json.dumps(target.model).encode() + b', "messages": ['
        line = _line(b"a", body + b"1," * (NUM_ITEMS - 1) + b"1]}")
        batch = await _until_over(
            client, await _submit(client, await _upload(client, line)), 3 * LIMIT_S * target.slack
        )
        counts = batch["request_counts"]
        held = batch["status"] == "completed" and counts["failed"] == 1
        return Finding(name, held, f"{batch['status']}, {counts}")


async def attack_blank_lines(target: Target) -> Finding:
    """Submits a file with 10 MB of blank lines eight times. Each is refused with a reason."""
    name = "batch: files of 10 MB of blank lines"
    async with _client(target) as client:
        file_id = await _upload(client, b"\n" * (10 << 20))
        ids = [await _submit(client, file_id) for _ in range(8)]
        batches = [await _until_over(client, each, 3 * LIMIT_S * target.slack) for each in ids]
        found = {(each["status"], _first_code(each)) for each in batches}
        return Finding(name, found == {("failed", "too_many_lines")}, str(found))


async def attack_many_jobs(target: Target) -> Finding:
    """Submits as many jobs as allowed, and then one of them has to be cancelled soon."""
    name = f"batch: {NUM_JOBS} jobs at once"
    async with _client(target) as client:
        lines = b"".join(_line(b"%d" % number, _question(target)) for number in range(500))
        file_id = await _upload(client, lines)
        answers = await _some_at_a_time([_post_batch(client, file_id) for _ in range(NUM_JOBS)])
        ids = [each.json()["id"] for each in answers if each.status_code == 200]
        refused = {each.status_code for each in answers} - {200}
        begun_s, limit_s = time.monotonic(), LIMIT_S * target.slack
        try:
            (await client.post(f"/v1/batches/{ids[-1]}/cancel")).raise_for_status()
            batch = await _until_over(client, ids[-1], limit_s)
            took_s = time.monotonic() - begun_s
        finally:
            await _some_at_a_time([client.post(f"/v1/batches/{each}/cancel") for each in ids])
        held = batch["status"] == "cancelled" and refused <= {429}
        detail = f"{len(ids)} taken, others {refused or 'none'}; cancelled after {took_s:.1f} s"
        return Finding(name, held and took_s < limit_s, detail)


async def attack_redis_that_hangs(target: Target) -> Finding:
    """File requests fail at once, chats continue, and Redis is killed and restarted."""
    name = "the private Redis hangs"
    pid = _redis_pid(target.pid)
    if pid is None:
        return Finding(name, True, "skipped: there is no private Redis")
    async with _client(target) as client:
        begun_s, limit_s = time.monotonic(), RESTART_S * target.slack
        os.kill(pid, signal.SIGSTOP)
        try:
            files, chat = await _while_it_hangs(client, target)
            while (await client.get("/v1/files")).status_code != 200:
                if time.monotonic() - begun_s > limit_s:
                    return Finding(name, False, f"files do not answer after {limit_s:g} s")
                await asyncio.sleep(0.2)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        took_s = time.monotonic() - begun_s
        held = files == 503 and chat == 200 and _redis_pid(target.pid) not in (None, pid)
        return Finding(name, held, f"files {files or 'late'}, chat {chat}, back after {took_s:.1f} s")


async def _while_it_hangs(client: httpx2.AsyncClient, target: Target) -> tuple[int, int]:
    """Returns the status of a file request and a chat while Redis hangs. The former is 0 if it came late."""
    # The first request waits. Once the gateway has noticed, others fail at once.
    first = asyncio.create_task(client.get("/v1/files"))
    others = list[asyncio.Task[httpx2.Response]]()
    while not (first.done() or any(each.done() for each in others)):
        await asyncio.sleep(0.5)
        others.append(asyncio.create_task(client.get("/v1/files")))
    quick = None if first.done() else next(each for each in others if each.done())
    chat = await client.post(
        ENDPOINT, content=_question(target), headers=_JSON, timeout=LIMIT_S * target.slack
    )
    await asyncio.wait({first, *others})
    return quick.result().status_code if quick else 0, chat.status_code


_JSON = {"Content-Type": "application/json"}


@contextlib.asynccontextmanager
async def _client(target: Target) -> AsyncIterator[httpx2.AsyncClient]:
    async with httpx2.AsyncClient(base_url=target.url, timeout=3 * LIMIT_S * target.slack) as client:
        yield client


def _question(target: Target) -> bytes:
    messages = [{"role": "user", "content": "How far?"}]
    return json.dumps({"model": target.model, "messages": messages, "max_tokens": 4}).encode()


def _line(custom_id: bytes, body: bytes) -> bytes:
    head = b'{"custom_id": "' + custom_id + b'", "method": "POST", "url": "'
    return head + ENDPOINT.encode() + b'", "body": ' + body + b"}\n"


async def _upload(client: httpx2.AsyncClient, content: bytes) -> str:
    form = {"purpose": (None, b"batch"), "file": ("in.jsonl", content)}
    answer = await client.post("/v1/files", files=form)
    answer.raise_for_status()
    return str(answer.json()["id"])


async def _post_batch(client: httpx2.AsyncClient, file_id: str) -> httpx2.Response:
    asked = {"input_file_id": file_id, "endpoint": ENDPOINT, "completion_window": "1h"}
    return await client.post("/v1/batches", json=asked)


async def _submit(client: httpx2.AsyncClient, file_id: str) -> str:
    answer = await _post_batch(client, file_id)
    answer.raise_for_status()
    return str(answer.json()["id"])


async def _until_over(client: httpx2.AsyncClient, batch_id: str, limit_s: float) -> dict[str, Any]:
    """Returns the batch's last state, final or not."""
    give_up_s = time.monotonic() + limit_s
    while True:
        batch: dict[str, Any] = (await client.get(f"/v1/batches/{batch_id}")).json()
        if batch["status"] in OVER or time.monotonic() > give_up_s:
            return batch
        await asyncio.sleep(0.1)


async def _some_at_a_time(calls: Sequence[Awaitable[httpx2.Response]]) -> list[httpx2.Response]:
    found: list[httpx2.Response] = []
    for start in range(0, len(calls), 20):
        found += await asyncio.gather(*calls[start : start + 20])
    return found


def _first_code(batch: dict[str, Any]) -> str | None:
    return batch["errors"]["data"][0]["code"] if batch["errors"] else None


def _redis_pid(launcher: int) -> int | None:
    """Searches the launcher's children."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    for child in children:
        with contextlib.suppress(OSError):
            name = Path(f"/proc/{child}/comm").read_text().strip()
            if name in ("redis-server", "valkey-server"):
                return int(child)
    return None
