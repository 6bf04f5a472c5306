"""The request fields and usage figures for KV that prompts share."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec.structs import replace

from alignedserve.protocol.messages import NewTokens, Request
from tests.gateway.scripted import ScriptedRouter
from tests.gateway.served import Served, SharedGateway, play, served

CHAT = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 5}
COMPLETION = {"prompt": ["one", "two"], "max_tokens": 5}


class Reusing(ScriptedRouter):
    """Had the KV of all but the last of each prompt's tokens, of each answer to it."""

    def _tokens(self, request: Request, news: NewTokens) -> NewTokens:
        return news if news.first else replace(news, num_reused=len(request.prompt) - 1)


@pytest.mark.parametrize(
    ("path", "body", "num_prompts"),
    [
        ("chat/completions", CHAT, 1),
        ("chat/completions", CHAT | {"n": 3}, 1),
        ("completions", COMPLETION, 2),
        ("completions", COMPLETION | {"n": 2}, 2),
    ],
)
def test_cached_tokens_are_those_of_prompts_however_many_answers_there_are(
    path: str, body: dict[str, Any], num_prompts: int
) -> None:
    async def scenario() -> None:
        async with served(Reusing()) as at:
            usage = (await at.post(f"/v1/{path}", body)).json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": usage["prompt_tokens"] - num_prompts}

    play(scenario)


def test_a_stream_says_it_with_its_usage() -> None:
    async def scenario() -> None:
        async with served(Reusing()) as at:
            body = CHAT | {"stream": True, "stream_options": {"include_usage": True}}
            *_, last, done = (await at.post("/v1/chat/completions", body)).text.strip().split("\n\n")
            usage = json.loads(last.removeprefix("data: "))["usage"]
            assert done == "data: [DONE]"
            assert usage["prompt_tokens_details"]["cached_tokens"] == usage["prompt_tokens"] - 1

    play(scenario)


@pytest.mark.parametrize(("path", "body"), [("chat/completions", CHAT), ("completions", COMPLETION)])
def test_a_salt_goes_with_each_request(path: str, body: dict[str, Any], gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        await at.post(f"/v1/{path}", body)
        assert {submit.request.cache_salt for submit in at.router.submitted} == {""}
        at.router.submitted.clear()
        await at.post(f"/v1/{path}", body | {"cache_salt": "pepper"})
        assert {submit.request.cache_salt for submit in at.router.submitted} == {"pepper"}

    gateway.play(scenario)


@pytest.mark.parametrize("salt", ["", "x" * 257, 7, ["a"]])
def test_a_salt_is_a_short_text(salt: Any, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        answer = await at.post("/v1/chat/completions", CHAT | {"cache_salt": salt})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "cache_salt"

    gateway.play(scenario)
