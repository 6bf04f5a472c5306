"""The load generator against servers: our gateway before a scripted island, and one that answers strangely."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from click.testing import CliRunner

from alignedserve.bench.client import Client, RequestOutcome, first_model
from alignedserve.bench.config import BenchConfig
from alignedserve.bench.workload import Item
from alignedserve.cli.bench import command
from tests.gateway.observed import Observed, observed
from tests.gateway.scripted import answer_of
from tests.gateway.served import play

CHAT = [{"role": "user", "content": "How far?"}]
NUM_TOKENS = len(answer_of("one two three"))


def item(due_s: float = 0.0, tier: str = "rt", answer: str | None = None) -> Item:
    return Item(due_s, tier, CHAT, 100, 0, answer)


async def ask(url: str, items: list[Item], **options: Any) -> list[RequestOutcome]:
    config = BenchConfig(base_url=url, backend="openai-chat", **options)
    async with httpx2.AsyncClient(trust_env=False) as http:
        outcomes, _ = await Client(config, http, "demo").run(items)
    return outcomes


def url_of(at: Observed) -> str:
    return str(at.http.base_url)


def test_an_answer_is_noted_token_by_token() -> None:
    async def scenario() -> None:
        async with observed() as at:
            (outcome,) = await ask(url_of(at), [item(answer="one two three")])
            assert outcome.error is None and outcome.is_right
            assert outcome.text == "one two three"
            assert len(outcome.times_s) == NUM_TOKENS - 1, "the last token has no text"
            assert outcome.output_len == NUM_TOKENS
            assert outcome.prompt_len == len(at.router.submitted[0].request.prompt)
            assert outcome.start_s <= outcome.times_s[0] and outcome.times_s == sorted(outcome.times_s)

    play(scenario)


def test_requests_are_sent_when_they_are_due_whether_others_are_answered_or_not() -> None:
    async def scenario() -> None:
        async with observed() as at:
            at.router.allowed = 1
            asking = asyncio.create_task(ask(url_of(at), [item(number / 20) for number in range(5)]))
            await at.router.until(lambda: len(at.router.submitted) == 5)
            at.router.allow(None)
            outcomes = await asking
            assert all(outcome.error is None for outcome in outcomes)
            assert all(outcome.start_s >= outcome.due_s for outcome in outcomes)

    play(scenario)


def has_submitted(at: Observed, count: int) -> bool:
    return len(at.router.submitted) >= count


def test_no_more_at_once_than_allowed() -> None:
    async def scenario() -> None:
        async with observed() as at:
            at.router.allowed = 1
            items = [item() for _ in range(3)]
            asking = asyncio.create_task(ask(url_of(at), items, max_concurrency=1))
            # were there another one, it would have come with the first: all are due at once
            for number in range(1, 4):
                await at.router.until(partial(has_submitted, at, number))
                assert len(at.router.submitted) == number
                at.router.allow(None)
                at.router.allowed = 1
            outcomes = await asking
            assert [outcome.error for outcome in outcomes] == [None] * 3

    play(scenario)


def test_what_fails_says_why_and_the_others_go_on() -> None:
    async def scenario() -> None:
        async with observed() as at:
            at.router.allowed = 1
            hanging, refused = await asyncio.gather(
                ask(url_of(at), [item()], request_timeout_s=0.2),
                ask(url_of(at), [Item(0.0, "rt", CHAT, -1, 0)]),
            )
            assert hanging[0].error == "not complete after 0.2 s"
            assert refused[0].error and refused[0].error.startswith("HTTP 400: ")

    play(scenario)


Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def strange_server(body: bytes) -> AsyncIterator[tuple[str, list[dict[str, Any]]]]:
    """Answers everything with `body`, and keeps what it was asked."""
    asked: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        asked.append(json.loads(await reader.readexactly(length)))
        writer.write(
            b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + body
        )
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", asked


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b'data: {"choices": []}\n\n', "the stream ended without [DONE]"),
        (b"data: nonsense\n\n", "an event is not JSON"),
        (b"data: [1]\n\n", "an event is not an object"),
        (b'data: {"error": {"message": "broken"}}\n\ndata: [DONE]\n\n', "broken"),
        (b'data:{"usage":{},"choices":[{"delta":{"content":"x"}}]}\r\n\r\ndata: [DONE]\r\n\r\n', None),
    ],
)
def test_streams_of_other_servers(body: bytes, error: str | None) -> None:
    async def scenario() -> None:
        async with strange_server(body) as (url, _):
            (outcome,) = await ask(url, [item()])
            assert outcome.error is None if error is None else error in (outcome.error or "")

    play(scenario)


def test_best_effort_says_so_and_nobody_else_speaks_of_tiers() -> None:
    async def scenario() -> None:
        async with strange_server(b"data: [DONE]\n\n") as (url, asked):
            await ask(url, [item(0.0, "be"), item(0.05, "rt")], be_share=0.5)
            await ask(url, [item()], temperature=0.0, ignore_eos=True)
            assert [body.get("service_tier") for body in asked] == ["flex", "default", None]
            assert asked[2]["temperature"] == 0 and asked[2]["ignore_eos"] is True
            assert asked[0]["stream_options"] == {"include_usage": True}

    play(scenario)


def test_demo_tasks_are_answered_at_temperature_0_unless_another_is_given() -> None:
    async def scenario() -> None:
        async with strange_server(b"data: [DONE]\n\n") as (url, asked):
            await ask(url, [item()])
            await ask(url, [item()], dataset_name="demo")
            await ask(url, [item()], dataset_name="demo", temperature=0.7)
            assert [body.get("temperature") for body in asked] == [None, 0.0, 0.7]

    play(scenario)


def test_the_model_is_the_first_that_the_server_lists() -> None:
    async def scenario() -> None:
        async with observed() as at:
            assert await first_model(at.http, url_of(at).rstrip("/")) == "demo"
            with pytest.raises(ValueError, match="lists no models"):
                await first_model(at.http, "http://127.0.0.1:9")

    play(scenario)


# The server lists the demo model, so both are the same.
@pytest.mark.parametrize("dataset", [["--dataset-name", "demo"], []])
def test_the_command_runs_and_saves(tmp_path: Path, dataset: list[str]) -> None:
    """From the options to the file; the whole run on another thread than the server."""
    options = [*dataset, "--num-prompts", "6", "--goodput", "ttft:20000", "tpot:9000"]
    options += ["--save-result", "--result-dir", str(tmp_path), "--disable-tqdm"]

    async def scenario() -> None:
        async with observed() as at:
            url = ["--base-url", url_of(at)]
            done = await asyncio.to_thread(CliRunner().invoke, command, ["serve", *url, *options])
            assert done.exit_code == 0, done.output
            assert "Request goodput (req/s):" in done.output
            assert "Correct answers (%):                     0.00" in done.output
            (path,) = tmp_path.iterdir()
            found = json.loads(path.read_text())
            assert (found["completed"], found["model_id"], found["attainment"]) == (6, "demo", {"rt": 1.0})

    play(scenario)


def test_the_command_refuses_what_it_does_not_know() -> None:
    done = CliRunner().invoke(command, ["serve", "ttft:200"])
    assert done.exit_code == 2 and "unexpected extra argument (ttft:200)" in done.output
