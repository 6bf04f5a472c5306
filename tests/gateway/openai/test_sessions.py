"""What calls say of next turns: sessions, and tools that are called and have answered."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from alignedserve.gateway.http.keys import digest_of
from alignedserve.gateway.openai.responses.body import ResponseBody
from tests.gateway.served import QUESTION, Served, SharedGateway, play, served
from tests.gateway.tools.test_tools import CLOCK, TEMPLATE, model_with

CHATS, COMPLETIONS, RESPONSES, MESSAGES = (
    f"/v1/{path}" for path in ("chat/completions", "completions", "responses", "messages")
)
BODIES: dict[str, dict[str, Any]] = {
    CHATS: {"messages": QUESTION},
    COMPLETIONS: {"prompt": "How far?"},
    RESPONSES: {"input": "How far?"},
    MESSAGES: {"messages": QUESTION, "max_tokens": 50},
}
MARK = {"cache_control": {"type": "ephemeral"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
ASKED, RESULT = (
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
)
USE = {"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "clock", "input": {}}]}
USED = {"type": "tool_result", "tool_use_id": "c", "content": "noon"}
FLAT = {"type": "function", "name": "clock", "parameters": {"type": "object"}}
RESPONSE_CALL = {"type": "function_call", "call_id": "c", "name": "clock", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "noon"}


@pytest.fixture(scope="module")
def with_tools() -> Iterator[SharedGateway]:
    with SharedGateway.running(model=model_with(TEMPLATE)) as found:
        yield found


@pytest.mark.parametrize(
    ("path", "more", "awaits"),
    [
        *((path, {}, "") for path in BODIES),
        *((path, {"session": "mine"}, "user") for path in BODIES),
        *((path, {"prompt_cache_key": "mine"}, "user") for path in (CHATS, COMPLETIONS, RESPONSES)),
        *((path, {"prompt_cache_key": ""}, "") for path in (CHATS, COMPLETIONS, RESPONSES)),
        (MESSAGES, MARK, "user"),
        (MESSAGES, {"system": [{"type": "text", "text": "Be brief."}]}, ""),
        (MESSAGES, {"system": [{"type": "text", "text": "Be brief."} | MARK]}, "user"),
        (
            MESSAGES,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "How?"} | MARK]}]},
            "user",
        ),
        (CHATS, {"tools": [CLOCK]}, "tool"),
        (CHATS, {"tools": [CLOCK], "session": "mine"}, "tool"),
        (CHATS, {"tools": [CLOCK], "tool_choice": "none", "session": "mine"}, "user"),
        (RESPONSES, {"tools": [FLAT]}, "tool"),
        (MESSAGES, {"tools": [{"name": "clock", "input_schema": {"type": "object"}}]}, "tool"),
    ],
)
def test_what_a_next_turn_awaits(
    path: str, more: dict[str, Any], awaits: str, with_tools: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        response = await at.post(path, BODIES[path] | more)
        assert response.status_code == 200, response.text
        assert "x-ignored-parameters" not in response.headers
        (submit,) = at.router.submitted
        assert (submit.request.awaits, submit.request.brings_results) == (awaits, False)

    with_tools.play(scenario)


@pytest.mark.parametrize(
    ("path", "more", "brings_results"),
    [
        (CHATS, {"messages": [*QUESTION, ASKED, RESULT]}, True),
        (CHATS, {"messages": [*QUESTION, ASKED, RESULT, *QUESTION]}, True),
        (
            CHATS,
            {"messages": [*QUESTION, ASKED, RESULT, {"role": "assistant", "content": "x"}, *QUESTION]},
            False,
        ),
        (RESPONSES, {"input": [{"role": "user", "content": "How?"}, RESPONSE_CALL, OUTPUT]}, True),
        (MESSAGES, {"messages": [*QUESTION, USE, {"role": "user", "content": [USED]}]}, True),
    ],
)
def test_results_of_tools_are_noticed(
    path: str, more: dict[str, Any], brings_results: bool, with_tools: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        response = await at.post(path, BODIES[path] | more)
        assert response.status_code == 200, response.text
        (submit,) = at.router.submitted
        assert submit.request.brings_results == brings_results

    with_tools.play(scenario)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("session", ["", "x" * 257, 7, ["a"], {"id": "a"}])
def test_a_session_is_a_short_text(path: str, session: Any, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        response = await at.post(path, BODIES[path] | {"session": session})
        assert response.status_code == 400 and "session" in json.dumps(response.json()["error"])
        assert not at.router.submitted

    gateway.play(scenario)


def test_a_response_that_continues_another_one_is_a_session() -> None:
    assert not ResponseBody(input="x").will_continue
    assert ResponseBody(input="x", previous_response_id="resp_x").will_continue
    assert ResponseBody(input="x", conversation="conv_x").will_continue


def test_sessions_of_the_same_name_are_apart_for_different_keys() -> None:
    owners = {digest_of(key): f"owner of {key}" for key in ("one", "two")}

    async def scenario() -> None:
        async with served(key_owners=owners) as at:
            for key in ("one", "two"):
                body = BODIES[CHATS] | {"session": "same"}
                response = await at.http.post(CHATS, json=body, headers={"Authorization": f"Bearer {key}"})
                assert response.status_code == 200, response.text
            requests = [submit.request for submit in at.router.submitted]
            assert len({each.owner for each in requests}) == len({each.cache_salt for each in requests}) == 2
            # The name itself goes no further than the gateway.
            assert not any("same" in repr(each) for each in requests)

    play(scenario)
