"""`return_progress`: a stream reports the progress of its prompt, as in llama.cpp."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.gateway.scripted import ScriptedRouter
from tests.gateway.served import QUESTION, Served, play, served

CALLS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION},
    "/v1/completions": {"prompt": "How far?", "max_tokens": 50},
}
all_calls = pytest.mark.parametrize("path", CALLS)


def waiting() -> ScriptedRouter:
    """It says nothing before it is allowed to."""
    router = ScriptedRouter()
    router.allow(0)
    return router


async def answered(at: Served, path: str, **options: Any) -> str:
    """Four tokens are computed, two of which were so before; then all, and the answer comes."""
    asking = asyncio.create_task(at.post(path, CALLS[path] | options))
    await at.router.until(lambda: bool(at.router.submitted))
    at.router.read(4, 2, 0.25)
    at.router.read(num_tokens(at), 2, 0.5)
    at.router.allow(None)
    return (await asking).text


def num_tokens(at: Served) -> int:
    return len(at.router.submitted[0].request.prompt)


def chunks_of(text: str) -> list[dict[str, Any]]:
    lines = text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def text_of(chunks: list[dict[str, Any]]) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@all_calls
def test_a_stream_says_how_far_its_prompt_is(path: str) -> None:
    async def scenario() -> None:
        async with served(waiting()) as at:
            options = {"include_usage": True}
            text = await answered(at, path, stream=True, return_progress=True, stream_options=options)
            chunks, total = chunks_of(text), num_tokens(at)
            assert [chunk["prompt_progress"] for chunk in chunks[:2]] == [
                {"total": total, "cache": 2, "processed": 4, "time_ms": 250},
                {"total": total, "cache": 2, "processed": total, "time_ms": 500},
            ]
            assert not any("prompt_progress" in chunk for chunk in chunks[2:])
            assert text_of(chunks[:2]) == "" and text_of(chunks) == "one two three"
            # Clients look at the first choice of each chunk but the last, which has the usage.
            assert [choice["index"] for chunk in chunks[:-1] for choice in chunk["choices"]] == [0] * (
                len(chunks) - 1
            )
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            assert len({chunk["id"] for chunk in chunks}) == 1

    play(scenario)


@pytest.mark.slow
@all_calls
@pytest.mark.parametrize(
    "options", [{"stream": True}, {"stream": True, "return_progress": False}, {"return_progress": True}]
)
def test_nothing_else_does(path: str, options: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with served(waiting()) as at:
            assert "prompt_progress" not in await answered(at, path, **options)
            assert not at.router.submitted[0].request.reports_progress

    play(scenario)


@pytest.mark.slow
def test_every_choice_has_its_own() -> None:
    async def scenario() -> None:
        async with served(waiting()) as at:
            path, options = "/v1/completions", {"stream": True, "return_progress": True, "n": 2}
            asking = asyncio.create_task(at.post(path, CALLS[path] | options))
            await at.router.until(lambda: len(at.router.submitted) == 2)
            at.router.read(4, 2, 0.25)
            at.router.allow(None)
            told = [chunk for chunk in chunks_of((await asking).text) if "prompt_progress" in chunk]
            assert sorted(chunk["choices"][0]["index"] for chunk in told) == [0, 1]

    play(scenario)


@pytest.mark.slow
def test_a_stream_that_has_text_is_not_told_again() -> None:
    """A router that takes over computes the prompt once more."""

    async def scenario() -> None:
        router = ScriptedRouter()
        router.allow(2)
        async with served(router) as at:
            path, options = "/v1/completions", {"stream": True, "return_progress": True}
            asking = asyncio.create_task(at.post(path, CALLS[path] | options))
            await router.until(lambda: bool(router.submitted))
            router.read(4, 0, 0.25)
            router.allow(None)
            assert "prompt_progress" not in (await asking).text

    play(scenario)


@pytest.mark.slow
def test_an_answer_that_fails_ends_as_any_stream_does() -> None:
    async def scenario() -> None:
        async with served(waiting()) as at:
            path, options = "/v1/chat/completions", {"stream": True, "return_progress": True}
            asking = asyncio.create_task(at.post(path, CALLS[path] | options))
            await at.router.until(lambda: bool(at.router.submitted))
            at.router.read(4, 0, 0.25)
            at.router.fail("NaN in its logits")
            chunks = chunks_of((await asking).text)
            assert [*chunks[0]][-1] == "prompt_progress" and "NaN" in chunks[-1]["error"]["message"]

    play(scenario)
