"""A crowd of streams of one client: its tokens come, it hangs up, and the event loop goes on in between."""

from __future__ import annotations

import asyncio
import gc
from asyncio import BaseEventLoop
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from uvicorn.protocols.http.h11_impl import RequestResponseCycle

from alignedserve.gateway.generation.call import ChoiceDelta
from alignedserve.gateway.generation.generation import Generation
from alignedserve.gateway.http.connection import HttpConnection
from alignedserve.gateway.http.connections import MAX_BEGUN_AT_ONCE, MAX_LOST_AT_ONCE
from alignedserve.gateway.islands.output_queue import MAX_TOLD_AT_ONCE, MAX_TOLD_WITH_LOGPROBS_AT_ONCE
from alignedserve.protocol.messages import NewTokens, Tokens
from alignedserve.protocol.prompt_logprobs import TokenLogprobs
from alignedserve.types import RequestKey
from tests.gateway.scripted import MODEL, ScriptedRouter
from tests.gateway.served import QUESTION, Served, play, served

NUM_STREAMS = 40
TOKEN = MODEL.tokenizer.encode("one")[0] if MODEL.tokenizer else 0


class Turns:
    """How often something happened in each turn of the event loop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[int] = Counter()
        self._number = 0
        run_once = BaseEventLoop._run_once  # type: ignore[attr-defined]

        def counted(loop: BaseEventLoop) -> None:
            self._number += 1
            run_once(loop)

        monkeypatch.setattr(BaseEventLoop, "_run_once", counted)

    def note(self) -> None:
        self.counts[self._number] += 1


class SilentRouter(ScriptedRouter):
    """Says nothing by itself."""

    def _say(self, key: RequestKey) -> None:
        return

    def tell_all(self, first: int, logprobs: list[TokenLogprobs]) -> None:
        """A token to every request, in one message, as an iteration of an engine has them."""
        gateway = next(iter(self._open.values()))[0]
        self.hub.send(gateway, Tokens([NewTokens(key, first, [TOKEN], logprobs) for key in self._open]))


@asynccontextmanager
async def crowd(at: Served, body: dict[str, Any]) -> AsyncIterator[list[asyncio.StreamWriter]]:
    """Streams whose clients read nothing."""
    content = at.http.build_request("POST", "/v1/chat/completions", json=body).content
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n"
    said = f"{head}Content-Type: application/json\r\n\r\n".encode() + content
    pipes = [await asyncio.open_connection("127.0.0.1", at.http.base_url.port) for _ in range(NUM_STREAMS)]
    writers = [writer for _, writer in pipes]
    try:
        # All of them in one turn of the event loop.
        for writer in writers:
            writer.write(said)
        await at.router.until(lambda: len(at.router.submitted) == NUM_STREAMS)
        yield writers
    finally:
        for writer in writers:
            writer.transport.abort()


@pytest.mark.parametrize("num_likeliest", [None, 3])
def test_tokens_for_a_crowd_are_given_to_a_few_in_each_turn(
    num_likeliest: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, take = Turns(monkeypatch), Generation._take

    def noted(self: Generation, *args: Any) -> ChoiceDelta:
        turns.note()
        return take(self, *args)

    monkeypatch.setattr(Generation, "_take", noted)
    body: dict[str, Any] = {"messages": QUESTION, "stream": True}
    most, logprobs = MAX_TOLD_AT_ONCE, list[TokenLogprobs]()
    if num_likeliest is not None:
        body |= {"logprobs": True, "top_logprobs": num_likeliest}
        likeliest = dict.fromkeys(range(10, 10 + num_likeliest), -1.0)
        most, logprobs = MAX_TOLD_WITH_LOGPROBS_AT_ONCE, [(-0.5, 1, likeliest)]

    async def scenario() -> None:
        router = SilentRouter()
        async with served(router) as at, crowd(at, body):
            router.tell_all(0, logprobs)
            while turns.counts.total() < NUM_STREAMS:
                await asyncio.sleep(0)

    play(scenario)
    assert max(turns.counts.values()) == most


def test_a_crowd_that_comes_begins_and_one_that_leaves_ends_a_few_in_each_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, lost = Turns(monkeypatch), Turns(monkeypatch)
    begin, lose = HttpConnection._begin, HttpConnection._lose

    def noted_begin(self: HttpConnection) -> None:
        begun.note()
        begin(self)

    def noted_lose(self: HttpConnection, exc: Exception | None) -> None:
        lost.note()
        lose(self, exc)

    monkeypatch.setattr(HttpConnection, "_begin", noted_begin)
    monkeypatch.setattr(HttpConnection, "_lose", noted_lose)

    async def scenario() -> None:
        router = SilentRouter()
        body = {"messages": QUESTION, "stream": True}
        async with served(router) as at, crowd(at, body) as writers:
            for writer in writers:
                writer.transport.abort()
            await router.until(lambda: len(router.aborted) == NUM_STREAMS)

    play(scenario)
    assert begun.counts.total() >= NUM_STREAMS and lost.counts.total() >= NUM_STREAMS
    assert max(begun.counts.values()) <= MAX_BEGUN_AT_ONCE
    assert max(lost.counts.values()) <= MAX_LOST_AT_ONCE


def test_requests_that_come_together_begin_a_few_in_each_turn_and_parts_of_a_head_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, begin, cycle = Turns(monkeypatch), HttpConnection._begin, RequestResponseCycle.run_asgi

    def noted(self: Any, *args: Any) -> Any:
        begun.note()
        return cycle(self, *args)

    waiting: list[bytes] = []

    def noted_begin(self: HttpConnection) -> None:
        waiting.append(bytes(self._arrived))
        begin(self)

    monkeypatch.setattr(RequestResponseCycle, "run_asgi", noted)
    monkeypatch.setattr(HttpConnection, "_begin", noted_begin)
    asked = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"

    async def scenario() -> None:
        async with served() as at:
            port = at.http.base_url.port
            pipes = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_STREAMS)]
            for _, writer in pipes:
                writer.write(asked * 3 + asked[:9])
            while begun.counts.total() < 3 * NUM_STREAMS:
                await asyncio.sleep(0)
            for _, writer in pipes:
                writer.write(asked[9:-1])
            # What it is answered shows that all of that has been read.
            assert (await at.http.get("/v1/models")).status_code == 200
            assert all(b"\r\n\r\n" in each for each in waiting)
            for _, writer in pipes:
                writer.transport.abort()

    play(scenario)
    assert max(begun.counts.values()) <= MAX_BEGUN_AT_ONCE


@pytest.mark.parametrize(
    "asked",
    [
        "GET /health",
        "HEAD /health",
        "OPTIONS /health",
        "GET /health?from=lb",
        "GET /%68ealth",
        "GET http://lb.example/health?x",
        "GET /",
        "HEAD /?x",
    ],
)
def test_a_probe_does_not_wait_behind_a_crowd(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the last that comes, and has one of the first turns."""
    order: list[bytes] = []
    begin = HttpConnection._begin

    def noted(self: HttpConnection) -> None:
        order.append(bytes(self._arrived).partition(b" HTTP")[0])
        begin(self)

    monkeypatch.setattr(HttpConnection, "_begin", noted)

    async def scenario() -> None:
        async with served() as at:
            port = at.http.base_url.port
            pipes = [await asyncio.open_connection("127.0.0.1", port) for _ in range(NUM_STREAMS + 1)]
            writers = [writer for _, writer in pipes]
            for writer in writers[1:]:
                writer.write(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            writers[0].write(f"{asked} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert (await pipes[0][0].readline()).split()[1] in (b"200", b"405")
            while len(order) <= NUM_STREAMS:
                await asyncio.sleep(0)
            for writer in writers:
                writer.close()

    play(scenario)
    assert order.index(asked.encode()) <= 2 * MAX_BEGUN_AT_ONCE


def test_streams_that_were_hung_up_leave_nothing_to_the_garbage_collector() -> None:
    """A thousand of them left so much that it held up all streams for 0.4 s."""
    found: list[str] = []

    async def scenario() -> None:
        router = SilentRouter()
        async with served(router) as at:
            # All tasks of the gateway itself are there.
            assert (await at.http.get("/health")).status_code == 200
            before = len(asyncio.all_tasks())
            gc.collect()
            gc.disable()
            try:
                async with crowd(at, {"messages": QUESTION, "stream": True}) as writers:
                    router.tell_all(0, [])
                    for writer in writers:
                        writer.transport.abort()
                while len(asyncio.all_tasks()) > before:
                    await asyncio.sleep(0)
                gc.set_debug(gc.DEBUG_SAVEALL)
                gc.collect()
                found.extend(type(each).__name__ for each in gc.garbage)
            finally:
                gc.set_debug(0)
                gc.garbage.clear()
                gc.enable()

    play(scenario)
    kept = Counter(found)
    assert not {"Connection", "Generation", "frame", "Task"} & kept.keys(), kept.most_common(20)
