"""Clients that validate responses, such as LiteLLM and autobatcher, find all that OpenAI's types require."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.gateway.served import QUESTION, Served, SharedGateway

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": QUESTION, "logprobs": True, "top_logprobs": 1},
    "/v1/completions": {"prompt": "How far?", "logprobs": 1},
    "/v1/responses": {"input": "How far?", "include": ["message.output_text.logprobs"]},
}
WHOLE: dict[str, type[BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/responses": Response,
}
# not of completions: their type has no place for the null that OpenAI's own server sends until the last
PIECES: dict[str, Any] = {
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/responses": ResponseStreamEvent,
}


@pytest.mark.parametrize("path", BODIES)
def test_an_answer_has_all_that_its_type_requires(path: str, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        answer = await at.post(path, {"model": "demo"} | BODIES[path])
        assert answer.status_code == 200, answer.text
        WHOLE[path].model_validate(answer.json())

    gateway.play(scenario)


@pytest.mark.parametrize("path", PIECES)
def test_a_streams_events_have_all_that_their_types_require(path: str, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        body = {"model": "demo", "stream": True, "stream_options": {"include_usage": True}} | BODIES[path]
        answer = await at.post(path, body)
        said = [line.removeprefix("data: ") for line in answer.text.splitlines() if line[:6] == "data: "]
        events = [json.loads(each) for each in said if each != "[DONE]"]
        assert len(events) > 2
        for event in events:
            TypeAdapter(PIECES[path]).validate_python(event)

    gateway.play(scenario)
