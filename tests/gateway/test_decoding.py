"""Nothing large is decoded where streams are served, whoever wrote it: each route of the application is called with as
much stored, and sent, as its limits allow."""

from __future__ import annotations

import asyncio
import json
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import httpx2
import msgspec
import pytest
from fastapi import FastAPI

from alignedserve.gateway import process as process_module
from alignedserve.gateway.app import create_app
from tests.gateway.batching import System, jsonl, play, question
from tests.gateway.served import QUESTION

# Two of these are nearly all that a body may have.
JUNK = "x" * 4_000_000
MAX_BYTES = 8 << 10
RESPONSES, BATCHES, FILES = "/v1/responses", "/v1/batches", "/v1/files"
RESPONSE = RESPONSES + "/{response_id}"
MESSAGE_BATCHES, CONVERSATIONS = "/v1/messages/batches", "/v1/conversations"

# What each of them is asked, besides JUNK.
ASKED: dict[str, dict[str, Any]] = {
    **{f"{at}/tokenize": {"prompt": "x"} for at in ("", "/v1")},
    **{f"{at}/detokenize": {"tokens": [5]} for at in ("", "/v1")},
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": QUESTION},
    "/v1/embeddings": {"input": "x"},
    "/invocations": {"prompt": "x"},
    "/pooling": {"input": "x"},
    **{path: {"text_1": "x", "text_2": "y"} for path in ("/score", "/v1/score")},
    **{path: {"query": "x", "documents": ["x", "y"]} for path in ("/rerank", "/v1/rerank", "/v2/rerank")},
}
# What can't be done here: no model has a head for classes, and these gateways have no launcher.
REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "/classify": (400, {"input": "x"}),
    "/v1/load_lora_adapter": (503, {"lora_name": "x", "lora_path": "y"}),
    "/v1/unload_lora_adapter": (503, {"lora_name": "x"}),
}
SHOWN = (
    "/",
    "/page/main.js",
    "/openapi.json",
    "/health",
    "/ping",
    "/load",
    "/version",
    "/metrics",
    "/tokenizer_info",
    "/v1/cluster",
    "/v1/models",
)


class Decoded:
    """The most bytes that a decoder was given at a time, in the thread in which this was made."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._most: tuple[int, str] = 0, ""

    def note(self, num_bytes: int, what: Any) -> None:
        if threading.get_ident() == self._thread:
            self._most = max(self._most, (num_bytes, f"{type(what).__name__} {str(what)[:200]}"))

    def taken(self) -> tuple[int, str]:
        """Returns what was noted since the last time, and what it was."""
        most, self._most = self._most, (0, "")
        return most

    def noting(self, decode: Callable[..., Any]) -> Callable[..., Any]:
        def noted(data: Any, *args: Any, **options: Any) -> Any:
            found = decode(data, *args, **options)
            self.note(len(data) - num_copied(found), found)
            return found

        return noted


def num_copied(found: Any) -> int:
    """The bytes that are in a decoded value as they came: they were copied in one go, or not at all."""
    match found:
        case bytes() | memoryview():
            return len(found)
        case msgspec.Struct():
            return sum(num_copied(getattr(found, name)) for name in found.__struct_fields__)
        case list() | tuple():
            return sum(map(num_copied, found))
        case dict():
            return sum(map(num_copied, found.values()))
    return 0


def watch(monkeypatch: pytest.MonkeyPatch) -> Decoded:
    decoded, parse = Decoded(), json.JSONDecoder.decode

    def parsing(decoder: json.JSONDecoder, text: str, *args: Any) -> Any:
        decoded.note(len(text), text)
        return parse(decoder, text, *args)

    monkeypatch.setattr(json.JSONDecoder, "decode", parsing)
    for module in (msgspec.json, msgspec.msgpack):
        monkeypatch.setattr(module, "decode", decoded.noting(module.decode))
    for name, module in list(sys.modules.items()):
        for attribute, value in list(vars(module).items()) if name.startswith("alignedserve.") else ():
            if isinstance(value, msgspec.json.Decoder | msgspec.msgpack.Decoder):
                noting = SimpleNamespace(decode=decoded.noting(value.decode))
                monkeypatch.setattr(module, attribute, noting)
    return decoded


def routes_of(app: FastAPI) -> Iterator[tuple[str, str]]:
    for route in app.router.routes:
        included = getattr(route, "original_router", None)
        routes: list[Any] = included.routes if included else [route]
        for each in routes:
            for method in each.methods - {"HEAD"}:
                yield method, each.path


@dataclass
class Trying:
    """Calls routes, and checks what is decoded meanwhile."""

    http: httpx2.AsyncClient
    decoded: Decoded
    tried: set[tuple[str, str]] = field(default_factory=set)

    async def call(self, method: str, path: str, query: str = "", status: int = 200, **options: Any) -> bytes:
        """`path` has the values of its parameters in braces: {name=value}."""
        url = re.sub(r"\{[^=}]*=([^}]*)\}", r"\1", path) + query
        answer = await self.http.request(method, url, **options)
        assert answer.status_code == status, (url, answer.content[:1000])
        num_bytes, what = self.decoded.taken()
        assert num_bytes <= MAX_BYTES, (method, url, num_bytes, what)
        self.tried.add((method, re.sub(r"=[^}]*", "", path)))
        return answer.content

    async def until_completed(self, path: str) -> None:
        while b'"status":"completed"' not in await self.call("GET", path):
            await asyncio.sleep(0.05)


def id_in(answer: bytes) -> str:
    # A parser would be seen.
    found = re.search(rb'"id":"([^"]*)"', answer)
    assert found
    return found[1].decode()


async def try_responses(trying: Trying, more: dict[str, Any]) -> None:
    body = {
        "input": [{"role": "user", "content": "How far?", "junk": JUNK}],
        "tools": [{"type": "other", "junk": JUNK}],
    }
    name = id_in(await trying.call("POST", RESPONSES, json=body | more))
    one = RESPONSE.replace("}", f"={name}}}")
    await trying.until_completed(one)
    goes_on = {"input": "x", "previous_response_id": name}
    await trying.call("POST", RESPONSES, json=goes_on)
    again = id_in(await trying.call("POST", RESPONSES, json=goes_on | {"background": True}))
    await trying.until_completed(RESPONSE.replace("}", f"={again}}}"))
    for path in ("input_tokens", "compact"):
        await trying.call("POST", f"{RESPONSES}/{path}", json=goes_on)
    await trying.call("GET", one, "?stream=true")
    await trying.call("GET", f"{one}/input_items", "?limit=1")
    if more:
        await trying.call("POST", f"{one}/cancel")
    await trying.call("DELETE", one)


async def try_conversations(trying: Trying) -> None:
    items = [{"role": "user", "content": "How far?", "junk": JUNK[::20]}] * 20
    metadata = {f"{number:064}": "\u00e9" * 512 for number in range(16)}
    body = {"items": items, "metadata": metadata}
    name = id_in(await trying.call("POST", CONVERSATIONS, json=body))
    one = f"{CONVERSATIONS}/{{conversation_id={name}}}"
    await trying.call("GET", one)
    await trying.call("POST", one, json={"metadata": metadata, "junk": JUNK})
    more = await trying.call("POST", f"{one}/items", json={"items": items[:15]})
    await trying.call("GET", f"{one}/items", "?limit=100")
    await trying.call("GET", f"{one}/items/{{item_id={id_in(more)}}}")
    goes_on: dict[str, Any] = {"input": "x", "conversation": name}
    await trying.call("POST", f"{RESPONSES}/input_tokens", json=goes_on)
    for options in ({}, {"store": False}, {"background": True}):
        answer = await trying.call("POST", RESPONSES, json=goes_on | options)
    await trying.until_completed(RESPONSE.replace("}", f"={id_in(answer)}}}"))
    await trying.call("DELETE", f"{one}/items/{{item_id={id_in(more)}}}")
    await trying.call("DELETE", one)


async def try_batches(trying: Trying) -> None:
    async def upload(lines: list[Any]) -> str:
        file = {"file": ("in.jsonl", jsonl(lines))}
        return id_in(await trying.call("POST", FILES, data={"purpose": "batch"}, files=file))

    large = await upload([question(number, junk=JUNK) for number in range(2)])
    other = await upload([question(1)])
    await trying.call("GET", FILES)
    await trying.call("GET", f"{FILES}/{{file_id={large}}}")
    await trying.call("GET", f"{FILES}/{{file_id={large}}}/content")
    body = {
        "input_file_id": large,
        "endpoint": "/v1/chat/completions",
        "completion_window": "24h",
        "metadata": {f"{number:064}": "\u00e9" * 512 for number in range(16)},
    }
    name = id_in(await trying.call("POST", BATCHES, json=body | {"junk": JUNK}))
    one = f"{BATCHES}/{{batch_id={name}}}"
    for path in (BATCHES, one):
        await trying.call("GET", path)
    await trying.call("POST", f"{one}/cancel")
    await trying.call("DELETE", f"{FILES}/{{file_id={other}}}")


async def try_message_batches(trying: Trying) -> None:
    params = {"model": "demo", "messages": QUESTION, "max_tokens": 5, "junk": JUNK}
    body = {"requests": [{"custom_id": f"q{number}", "params": params} for number in range(2)]}
    name = id_in(await trying.call("POST", MESSAGE_BATCHES, json=body))
    one = f"{MESSAGE_BATCHES}/{{message_batch_id={name}}}"
    await trying.call("GET", MESSAGE_BATCHES)
    await trying.call("POST", f"{one}/cancel")
    while b'"processing_status":"ended"' not in await trying.call("GET", one):
        await asyncio.sleep(0.05)
    await trying.call("GET", f"{one}/results")
    await trying.call("DELETE", one)


@pytest.mark.slow
def test_nothing_large_is_decoded_where_streams_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    apps: list[FastAPI] = []

    def creating(*args: Any, **options: Any) -> FastAPI:
        apps.append(create_app(*args, **options))
        return apps[-1]

    monkeypatch.setattr(process_module, "create_app", creating)

    async def scenario(at: System) -> None:
        trying = Trying(at.gateway.http, watch(monkeypatch))
        for more in ({}, {"background": True}):
            await try_responses(trying, more)
        for path, body in ASKED.items():
            await trying.call("POST", path, json=body | {"junk": JUNK})
        for path, (status, body) in REFUSED.items():
            await trying.call("POST", path, status=status, json=body | {"junk": JUNK})
        for path in ("/reset_prefix_cache", "/flush_cache"):
            await trying.call("POST", path)
        await trying.call("GET", "/docs", status=307)
        for path in SHOWN:
            await trying.call("GET", re.sub(r"(?<=page/)(.*)", r"{name=\1}", path))
        await trying.call("GET", "/v1/models/{name:path=demo}")
        await try_conversations(trying)
        await try_message_batches(trying)
        await try_batches(trying)
        untried = sorted(set(routes_of(apps[0])) - trying.tried)
        assert untried == [], "routes that have no entry here"

    play(scenario)
