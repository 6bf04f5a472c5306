"""The table of docs/clients.md: what happens to each field of the published APIs, compared with the packages' types."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

from alignedserve.gateway.anthropic.bodies import MessagesBody
from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.openai.bodies import ChatBody, CompletionBody
from alignedserve.gateway.openai.responses.body import ResponseBody
from tests.clients.environments import python_of
from tests.gateway.served import QUESTION, Served, SharedGateway

PAGE = Path(__file__).parents[2] / "docs/clients.md"
# API -> path, body, and a body that is answered
APIS: dict[str, tuple[str, type[GenerationBody], dict[str, Any]]] = {
    "completions": ("/v1/completions", CompletionBody, {"prompt": "How far?"}),
    "chats": ("/v1/chat/completions", ChatBody, {"messages": QUESTION}),
    "responses": ("/v1/responses", ResponseBody, {"input": "How far?"}),
    "messages": ("/v1/messages", MessagesBody, {"messages": QUESTION, "max_tokens": 50}),
}
OPENAI: dict[str, list[Any]] = {
    "completions": [
        completions.CompletionCreateParamsNonStreaming,
        completions.CompletionCreateParamsStreaming,
    ],
    "chats": [chats.CompletionCreateParamsNonStreaming, chats.CompletionCreateParamsStreaming],
    "responses": [responses.ResponseCreateParamsNonStreaming, responses.ResponseCreateParamsStreaming],
}
# run by the client's own Python: its package is not the server's
ANTHROPIC = """
import json
from anthropic.types import message_create_params as plain
from anthropic.types.beta import message_create_params as beta
names = ("MessageCreateParamsNonStreaming", "MessageCreateParamsStreaming")
kinds = [getattr(module, name) for module in (plain, beta) for name in names]
print(json.dumps(sorted(set().union(*(kind.__required_keys__ | kind.__optional_keys__ for kind in kinds)))))
"""


def table() -> dict[tuple[str, str], list[str]]:
    """(API, what happens) -> fields"""
    rows = re.findall(
        r"^\| (\w+) \| (read|without effect|refused|ignored) \| (.*?) \|", PAGE.read_text(), re.MULTILINE
    )
    return {(api, what): re.findall("`(.*?)`", fields) for api, what, fields in rows}


TABLE = table()


@pytest.mark.parametrize("api", OPENAI)
def test_every_field_of_openais_types_is_decided(api: str) -> None:
    known = set().union(*(kind.__required_keys__ | kind.__optional_keys__ for kind in OPENAI[api]))
    assert fields_of(api) == sorted(known)


def test_every_field_of_anthropics_types_is_decided() -> None:
    printed = subprocess.run([python_of("anthropic"), "-c", ANTHROPIC], capture_output=True, check=True)
    assert fields_of("messages") == json.loads(printed.stdout)


def fields_of(api: str) -> list[str]:
    """Each once."""
    return sorted(name for (of, _), names in TABLE.items() if of == api for name in names)


@pytest.mark.parametrize(("api", "what"), TABLE)
def test_what_the_table_says_is_so(api: str, what: str, gateway: SharedGateway) -> None:
    path, body, asked = APIS[api]
    if what in ("read", "without effect"):
        assert set(TABLE[api, what]) <= body.model_fields.keys()
        return

    async def scenario(at: Served) -> None:
        for name in TABLE[api, what]:
            response = await at.post(path, {"model": "demo", name: {"type": "some"}} | asked)
            if what == "refused":
                assert response.status_code == 400 and name in response.text, response.text
            else:
                assert response.status_code == 200, response.text
                assert response.headers["x-ignored-parameters"] == name

    gateway.play(scenario)
