"""What the holder of one key can do to the holder of another, and what a client without a key, or whoever writes the
file of keys, can do to both."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx2

from benchmarks.attack.answers import SLOW_PROPERTIES
from benchmarks.attack.target import KEYS, NEWCOMER, Finding, Target

NEEDS_KEYS = True
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = {"role": "user", "content": "How far?"}
ATTACKER, VICTIM = KEYS


def _client(target: Target, key: str | None) -> httpx2.AsyncClient:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return httpx2.AsyncClient(base_url=target.url, timeout=60 * target.slack, headers=headers)


async def attack_without_a_key(target: Target) -> Finding:
    """All calls get the same answer, before their body is read."""
    asked = [
        ("GET", "/v1/models"),
        ("GET", "/v1/files"),
        ("GET", "/v1/batches"),
        ("GET", "/v1/cluster"),
        ("POST", CHAT),
        ("POST", "/tokenize"),
        ("POST", "/v1/files"),
        ("DELETE", "/v1/files/file-x"),
    ]
    wrong = [None, VICTIM[:1], VICTIM[:-1], f"{VICTIM}x", VICTIM.upper(), f"{ATTACKER} {VICTIM}", "*"]
    statuses: set[int] = set()
    for key in wrong:
        async with _client(target, key) as http:
            statuses |= {(await http.request(method, path)).status_code for method, path in asked}
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: {target.host}\r\nContent-Length: 8000000\r\n\r\n"
        writer.write(head.encode())
        first = await asyncio.wait_for(reader.readline(), 5 * target.slack)
    finally:
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
    held = statuses == {401} and b" 401 " in first
    return Finding("calls without a key", held, f"{statuses}, before a body {first.decode().strip()}")


async def attack_anothers_files(target: Target) -> Finding:
    """Another key's files and jobs can't be listed, read, used, deleted or cancelled."""
    async with _client(target, VICTIM) as victim, _client(target, ATTACKER) as attacker:
        body = {"model": target.model, "messages": [USER], "max_tokens": 200, "ignore_eos": True}
        line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": body}).encode()
        form = {"purpose": (None, b"batch"), "file": ("in.jsonl", line)}
        file_id = (await victim.post("/v1/files", files=form)).json()["id"]
        wanted = {"input_file_id": file_id, "endpoint": CHAT, "completion_window": "1h"}
        batch_id = (await victim.post("/v1/batches", json=wanted)).json()["id"]
        answers = [
            await attacker.get(f"/v1/files/{file_id}"),
            await attacker.get(f"/v1/files/{file_id}/content"),
            await attacker.delete(f"/v1/files/{file_id}"),
            await attacker.get(f"/v1/batches/{batch_id}"),
            await attacker.post(f"/v1/batches/{batch_id}/cancel"),
            await attacker.post("/v1/batches", json=wanted),
        ]
        statuses = [answer.status_code for answer in answers]
        listed = [(await attacker.get(path)).json()["data"] for path in ("/v1/files", "/v1/batches")]
        own = [
            (await victim.get(path)).status_code
            for path in (f"/v1/files/{file_id}", f"/v1/batches/{batch_id}")
        ]
        await victim.post(f"/v1/batches/{batch_id}/cancel")
    held = (
        statuses[:5] == [404] * 5 and statuses[5] in (400, 404) and listed == [[], []] and own == [200, 200]
    )
    return Finding(
        "another key's files and jobs", held, f"{statuses}, lists {[len(some) for some in listed]}, own {own}"
    )


async def attack_anothers_prompt(target: Target) -> Finding:
    """The number of cached tokens doesn't reveal whether another client has sent the same prompt."""
    prompt = "A letter that nobody else has read. " * 40

    async def num_cached(http: httpx2.AsyncClient) -> int:
        answer = await http.post(COMPLETIONS, json={"prompt": prompt, "max_tokens": 1})
        details: dict[str, Any] = answer.json()["usage"].get("prompt_tokens_details") or {}
        return int(details.get("cached_tokens") or 0)

    async with _client(target, VICTIM) as victim, _client(target, ATTACKER) as attacker:
        first, again = await num_cached(victim), await num_cached(victim)
        seen = await num_cached(attacker)
    held = first == 0 and again > 0 and seen == 0
    return Finding(
        "another key's prompts", held, f"cached tokens {first}, again {again}, with another key {seen}"
    )


async def attack_large_bodies(target: Target) -> Finding:
    """Another key's body, which is not small either, waits for at most one of these."""
    large = json.dumps({"prompt": [[1]] * 500_000, "max_tokens": 1}).encode()
    small = json.dumps({"messages": [USER], "user": "x" * 300_000, "max_tokens": 1}).encode()
    asked = {"Content-Type": "application/json"}
    async with _client(target, VICTIM) as victim, _client(target, ATTACKER) as attacker:
        # This starts the process that reads them, so that it runs from now on.
        await victim.post(CHAT, content=small, headers=asked)
        going_on = [
            asyncio.create_task(attacker.post(COMPLETIONS, content=large, headers=asked)) for _ in range(12)
        ]
        await asyncio.sleep(0.5)
        begun_s = time.monotonic()
        answer = await victim.post(CHAT, content=small, headers=asked)
        took_s = time.monotonic() - begun_s
        num_left = await _ended(going_on)
    # One had its turn when the victim's body came, and one may have had the next turn.
    held = answer.status_code == 200 and num_left >= 8
    detail = f"{answer.status_code} after {took_s:.2f} s, with {num_left} of 12 to come"
    return Finding("a key's large bodies", held, detail)


async def attack_slow_grammars(target: Target) -> Finding:
    """Another key's grammar, which is not quick either, doesn't wait for all of these."""

    def asked(num_properties: int, title: str) -> dict[str, Any]:
        properties = dict(list(SLOW_PROPERTIES.items())[:num_properties])
        schema = {"type": "object", "properties": properties, "title": title}
        return {"messages": [USER], "max_tokens": 1, "structured_outputs": {"json": schema}}

    async with _client(target, VICTIM) as victim, _client(target, ATTACKER) as attacker:
        await victim.post(CHAT, json=asked(0, "the process that compiles is there from now on"))
        going_on = [
            asyncio.create_task(attacker.post(CHAT, json=asked(500, str(number)))) for number in range(14)
        ]
        await asyncio.sleep(0.5)
        begun_s = time.monotonic()
        # Two properties take three times as long as the first lane allows, and a fifth of what the second allows. An
        # instance compiles them again before it answers, and has to finish before the attacker's next grammar.
        answer = await victim.post(CHAT, json=asked(2, "the victim's"))
        took_s = time.monotonic() - begun_s
        num_left = await _ended(going_on)
    # One had its turn when the victim's grammar came, and one may have had the next turn.
    held = answer.status_code == 200 and num_left >= 12
    detail = f"{answer.status_code} after {took_s:.2f} s, with {num_left} of 14 to come"
    return Finding("a key's slow grammars", held, detail)


async def attack_memory_for_bodies(target: Target) -> Finding:
    """Sends a hundred bodies that never end. Another key's bodies must still be read."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {target.host}\r\nAuthorization: Bearer {ATTACKER}\r\n"
        "Content-Type: application/json\r\nContent-Length: 8000000\r\n\r\n"
    ).encode()
    pipes: list[asyncio.StreamWriter] = []

    async def half_a_body() -> None:
        with contextlib.suppress(ConnectionError):
            _, writer = await asyncio.open_connection(target.host, target.port)
            pipes.append(writer)
            writer.write(head + b" " * 7_000_000)

    try:
        await asyncio.gather(*(half_a_body() for _ in range(100)))
        async with _client(target, VICTIM) as victim:
            begun_s = time.monotonic()
            body = {"messages": [USER], "user": "x" * 200_000, "max_tokens": 1}
            answer = await victim.post(CHAT, json=body)
            took_s = time.monotonic() - begun_s
    finally:
        for writer in pipes:
            writer.transport.abort()
    held = answer.status_code == 200
    return Finding("a key's bodies that never end", held, f"{answer.status_code} after {took_s:.2f} s")


async def _ended(going_on: list[asyncio.Task[httpx2.Response]]) -> int:
    """Returns how many were not answered yet."""
    num_left = sum(not each.done() for each in going_on)
    for each in going_on:
        each.cancel()
    await asyncio.gather(*going_on, return_exceptions=True)
    return num_left


# ---- the file of keys ----


async def attack_comments_in_the_file_of_keys(target: Target) -> Finding:
    """Its lines end at a line feed, whatever else a text's lines may end at."""
    odd = ["\x0c", "\x0b", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029"]
    added = [f"key-in-a-comment-{number}" for number in range(len(odd))]
    comments = "".join(f"# old:{end}{key}\n" for end, key in zip(odd, added, strict=True))
    return await _with_keys(target, lambda text: text + comments, added, "a key in a comment")


async def attack_a_cut_file_of_keys(target: Target) -> Finding:
    """A file that is read while it is written."""
    return await _with_keys(target, lambda text: text[:-5], [NEWCOMER[:-4]], "half of a key")


async def _with_keys(
    target: Target, changed: Callable[[str], str], never: Sequence[str], name: str
) -> Finding:
    """Changes the file of keys for some seconds. Held if none of `never` is a key, and the victim's remains one."""
    path = target.state_dir / "keys"
    text = path.read_text()
    path.write_text(changed(text))
    try:
        deadline, found = time.monotonic() + 3.0 * target.slack, set[str]()
        while time.monotonic() < deadline:
            found |= {key for key in never if await _is_key(target, key)}
            await asyncio.sleep(0.2)
        keeps_others = await _is_key(target, VICTIM)
    finally:
        path.write_text(text)
    while not await _is_key(target, NEWCOMER):
        await asyncio.sleep(0.1)
    return Finding(name, not found and keeps_others, f"{len(found)} of {len(never)} accepted")


async def _is_key(target: Target, key: str) -> bool:
    async with _client(target, key) as http:
        return (await http.get("/v1/models")).status_code == 200


# ---- one request, read in two ways ----


async def attack_several_keys(target: Target) -> Finding:
    """A proxy may check one of them, and the server another."""
    async with _client(target, None) as http:
        several = [
            [("Authorization", f"Bearer {ATTACKER}"), ("Authorization", f"Bearer {VICTIM}")],
            [("Authorization", "Bearer x"), ("Authorization", f"Bearer {VICTIM}")],
            [("Authorization", f"Bearer {ATTACKER}"), ("x-api-key", VICTIM)],
        ]
        statuses = [(await http.get("/v1/models", headers=each)).status_code for each in several]
    return Finding("several keys in a request", statuses == [400] * 3, str(statuses))


async def attack_held_back_body(target: Target) -> Finding:
    """Waits to be asked for a body, without a key."""
    head = (
        f"POST {CHAT} HTTP/1.1\r\nHost: {target.host}\r\nExpect: 100-continue\r\nContent-Length: 29\r\n\r\n"
    )
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(head.encode())
        line = await asyncio.wait_for(reader.readline(), 5 * target.slack)
    finally:
        writer.close()
    return Finding("a body that is held back", b" 401 " in line, line.decode().strip())


async def attack_half_closed(target: Target) -> Finding:
    """Closes the sending side after a whole call. The answer must arrive, and then the end."""
    body = json.dumps({"model": target.model, "prompt": "x", "max_tokens": 4}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {target.host}\r\nAuthorization: Bearer {ATTACKER}\r\n"
    reader, writer = await asyncio.open_connection(target.host, target.port)
    try:
        writer.write(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode())
        writer.write(body)
        writer.write_eof()
        got = await asyncio.wait_for(reader.read(-1), 10 * target.slack)
    finally:
        writer.close()
    answers = got.replace(b"HTTP/1.1 100 Continue\r\n\r\n", b"")
    return Finding("a half-closed connection", answers.startswith(b"HTTP/1.1 200 "), f"{len(got)} bytes")
