"""The ids of an answer's tokens and of its prompt's, as vLLM has them: `return_token_ids`."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.gateway.scripted import TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import QUESTION, Served, play, served
from tests.gateway.tools.test_reasoning import QWEN
from tests.gateway.tools.test_tools import CALL, CLOCK, WEATHER, model_with

# Most of its tokens show nothing when they come: they are parts of marks, and of a call.
SAID = f"<think>Hm.</think>One.{CALL}"
CHAT = {"messages": QUESTION, "tools": [WEATHER, CLOCK], "return_token_ids": True}
COMPLETION = {"prompt": ["How far?", "How near is it?"], "return_token_ids": True, "max_tokens": 100}


async def answered(at: Served, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the answer, or its chunks."""
    response = await at.post(path, {"model": "demo"} | body)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return [response.json()]
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("more", [{}, {"logprobs": True}, {"n": 2}], ids=str)
def test_a_chat_has_the_ids_of_its_tokens(more: dict[str, Any], is_stream: bool) -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter(answer=answer_of(SAID)), model=model_with(QWEN)) as at:
            parts = await answered(at, "/v1/chat/completions", CHAT | more | {"stream": is_stream})
            num = more.get("n", 1)
            prompts = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
            assert prompts == [list(at.router.submitted[0].request.prompt)] * (num if is_stream else 1)
            assert tokens_of(parts) == {index: answer_of(SAID) for index in range(num)}

    play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("more", [{"echo": True}, {"logprobs": 1}, {"n": 2}], ids=str)
def test_a_completion_has_the_ids_of_its_tokens(more: dict[str, Any], is_stream: bool) -> None:
    async def scenario() -> None:
        async with served() as at:
            parts = await answered(at, "/v1/completions", COMPLETION | more | {"stream": is_stream})
            num = more.get("n", 1)
            prompts = {
                choice["index"]: choice["prompt_token_ids"]
                for part in parts
                for choice in part["choices"]
                if "prompt_token_ids" in choice
            }
            submitted = {tuple(each.request.prompt) for each in at.router.submitted}
            assert len(prompts) == 2 * num and {tuple(each) for each in prompts.values()} == submitted
            assert prompts[0] == prompts[num - 1] != prompts[num]
            assert tokens_of(parts) == {index: answer_of("one two three") for index in range(2 * num)}

    play(scenario)


@pytest.mark.parametrize("more", [{}, {"logprobs": 0}], ids=str)
def test_a_stream_of_a_completion_has_ids_with_the_text_that_they_belong_to(more: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with served() as at:
            asked = COMPLETION | more | {"prompt": "How far?", "stream": True}
            choices = [chunk["choices"][0] for chunk in await answered(at, "/v1/completions", asked)]
            prompts = [choice.get("prompt_token_ids") for choice in choices]
            assert prompts == [list(at.router.submitted[0].request.prompt), *[None] * (len(choices) - 1)]
            tokens = [(choice["text"], choice["token_ids"]) for choice in choices if choice["token_ids"]]
            # (The last one is the end of the output, which is no text.)
            assert len(tokens) > 3 and all(text == TOKENIZER.decode(ids) for text, ids in tokens[:-1])

    play(scenario)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
@pytest.mark.parametrize("is_stream", [False, True])
def test_without_asking_there_are_none(path: str, body: dict[str, Any], is_stream: bool) -> None:
    async def scenario() -> None:
        async with served(model=model_with(QWEN)) as at:
            for asked in (None, False):
                more = {"return_token_ids": asked, "stream": is_stream}
                assert "token_ids" not in json.dumps(await answered(at, path, body | more))

    play(scenario)


def test_an_echo_alone_has_no_tokens_of_its_own() -> None:
    async def scenario() -> None:
        async with served() as at:
            (answer,) = await answered(at, "/v1/completions", COMPLETION | {"echo": True, "max_tokens": 0})
            assert [choice["token_ids"] for choice in answer["choices"]] == [[], []]

    play(scenario)


def tokens_of(parts: list[dict[str, Any]]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for choice in (choice for part in parts for choice in part["choices"]):
        found.setdefault(choice["index"], []).extend(choice.get("token_ids", []))
    return found
