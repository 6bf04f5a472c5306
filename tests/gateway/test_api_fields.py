"""The table of docs/clients.md: what happens to each field of the published APIs, compared with the packages' types."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
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
from tests.gateway.scripted import ScriptedRouter, answer_of
from tests.gateway.served import QUESTION, Served, SharedGateway, play, served
from tests.gateway.tools.test_reasoning import DEEPSEEK
from tests.gateway.tools.test_tools import TEMPLATE, model_with

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


@pytest.mark.parametrize(("api", "what"), [key for key in TABLE if key[1] in ("refused", "ignored")])
def test_what_the_table_says_is_so(api: str, what: str, gateway: SharedGateway) -> None:
    path, _, asked = APIS[api]

    async def scenario(at: Served) -> None:
        for name in TABLE[api, what]:
            response = await at.post(path, {"model": "demo", name: {"type": "some"}} | asked)
            if what == "refused":
                assert response.status_code == 400 and name in response.text, response.text
            else:
                assert response.status_code == 200, response.text
                assert response.headers["x-ignored-parameters"] == name

    gateway.play(scenario)


CLOCK = {"type": "function", "function": {"name": "clock"}}
FLAT = {"type": "function", "name": "clock"}
GIVEN = {"name": "clock", "input_schema": {"type": "object"}}
FORM: dict[str, Any] = {"type": "json_schema", "schema": {"type": "object"}}
# What a field is tried with. The calls have tools, so that fields that are about these do something.
VALUES: dict[str, Any] = {
    "background": True,
    "best_of": 2,
    "cache_control": {"type": "ephemeral"},
    "conversation": "conv_x",
    "echo": True,
    "frequency_penalty": 0.5,
    "include": ["message.output_text.logprobs"],
    "input": "How near?",
    "instructions": "Be brief.",
    "logit_bias": {"5": 1},
    "max_completion_tokens": 5,
    "max_output_tokens": 5,
    "max_tokens": 5,
    "max_tool_calls": 5,
    "messages": [{"role": "user", "content": "How near?"}],
    "metadata": {"user_id": "x"},
    "modalities": ["audio"],
    "model": "other",
    "n": 2,
    "output_config": {"format": FORM},
    "parallel_tool_calls": False,
    "presence_penalty": 0.5,
    "previous_response_id": "resp_x",
    "prompt": "How near?",
    "prompt_cache_key": "x",
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "high"},
    "reasoning_effort": "high",
    "response_format": {"type": "json_object"},
    "safety_identifier": "x",
    "seed": 7,
    "service_tier": "flex",
    "stop": ["two"],
    "stop_sequences": ["two"],
    "store": True,
    "stream": True,
    "stream_options": {"include_usage": True},
    "suffix": "x",
    "system": "Be brief.",
    "temperature": 0.5,
    "text": {"format": {"type": "json_object"}},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "top_logprobs": 2,
    "top_p": 0.5,
    "truncation": "auto",
    "user": "x",
    "verbosity": "low",
}
VALUES_OF: dict[str, dict[str, Any]] = {
    "completions": {"logprobs": 2},
    "chats": {"logprobs": True, "tool_choice": "required", "tools": [CLOCK, CLOCK]},
    "responses": {
        "stream_options": {"include_obfuscation": True},
        "tool_choice": "required",
        "tools": [FLAT, FLAT],
    },
    "messages": {"tool_choice": {"type": "any"}, "tools": [GIVEN, GIVEN], "service_tier": "flex"},
}
TOOLS_OF: dict[str, dict[str, Any]] = {
    "completions": {},
    "chats": {"tools": [CLOCK]},
    "responses": {"tools": [FLAT]},
    "messages": {"tools": [GIVEN]},
}


# They do nothing where tools are offered.
NAMES_OF_CHATS = ("cache_control", "prompt_cache_key")


@pytest.fixture(scope="module")
def with_tools() -> Iterator[SharedGateway]:
    template = TEMPLATE + "{{ reasoning_effort }}{{ thinking }}"
    with SharedGateway.running(model=model_with(template)) as found:
        yield found


@pytest.mark.parametrize(("api", "what"), [key for key in TABLE if key[1] in ("read", "without effect")])
def test_a_field_that_is_read_changes_something_and_one_without_effect_does_not(
    api: str, what: str, with_tools: SharedGateway
) -> None:
    path, body_type, asked = APIS[api]
    assert set(TABLE[api, what]) <= body_type.model_fields.keys()
    without_tools = {"model": "demo"} | asked

    async def scenario(at: Served) -> None:
        for name in TABLE[api, what]:
            plain = without_tools if name in NAMES_OF_CHATS else without_tools | TOOLS_OF[api]
            expected = await seen_of(at, path, plain)
            assert await seen_of(at, path, plain) == expected, "the same call is the same"
            seen = await seen_of(at, path, plain | {name: (VALUES | VALUES_OF[api])[name]})
            if what == "read":
                # Nothing can be kept here. tests/gateway/openai/responses tries it beside a store.
                assert seen != expected or (api, name) == ("responses", "store"), name
            else:
                assert seen[:2] == expected[:2] and seen[0] == 200, name

    with_tools.play(scenario)


async def seen_of(at: Served, path: str, body: dict[str, Any]) -> tuple[int, Any, str]:
    """(status, what was submitted, the answer), without what differs in any two calls"""
    at.router.submitted.clear()
    response = await at.post(path, body)
    submitted = [
        (
            *(each.request.prompt, each.request.params, each.request.tier, each.request.tbt_s),
            each.request.awaits,
        )
        for each in at.router.submitted
    ]
    answer = re.sub(r'("(?:created|\w+_at)":)\d+|(?<=[a-z][-_])[0-9a-f]{24,}', r"\1", response.text)
    return response.status_code, submitted, answer


# What the audited clients and their documents send to other servers, with a value that changes the output there.
FOREIGN: dict[str, Any] = {
    "custom_logit_processor": "x",
    "dry_multiplier": 0.8,
    "guided_json": {},
    "input_ids": [1, 2],
    "logprob_token_ids": [1],
    "lora_path": "x",
    "mirostat": 2,
    "no_stop_trim": True,
    "prompt_embeds": "x",
    "repetition_detection": {"max_pattern_size": 8},
    "stop_regex": "a+",
    "thinking_token_budget": 100,
    "typical_p": 0.9,
    "vllm_xargs": {"a": 1},
    "xtc_probability": 0.5,
}
# The values with which these servers' clients send them all, and which change nothing.
PLAIN: dict[str, list[Any]] = {
    **{name: [None, False, 0, "", []] for name in GenerationBody.refused},
    **{name: [neutral] for name, neutral in GenerationBody.neutral.items()},
}


@pytest.mark.parametrize("api", APIS)
def test_fields_of_other_servers_are_refused_unless_they_change_nothing(
    api: str, gateway: SharedGateway
) -> None:
    path, body_type, asked = APIS[api]
    assert FOREIGN.keys() <= GenerationBody.refused.keys() <= body_type.refused.keys()
    assert body_type.neutral == GenerationBody.neutral

    async def scenario(at: Served) -> None:
        for name in body_type.refused:
            response = await at.post(
                path, {"model": "demo", name: FOREIGN.get(name, {"type": "some"})} | asked
            )
            assert response.status_code == 400, (name, response.text)
            assert f"{name}: not supported by this server" in response.text
        for name, values in PLAIN.items():
            for value in values:
                response = await at.post(path, {"model": "demo", name: value} | asked)
                assert response.status_code == 200, (name, value, response.text)
                assert "x-ignored-parameters" not in response.headers

    gateway.play(scenario)


THINKING_OFF: list[dict[str, Any]] = [
    {"reasoning_effort": "none"},
    {"reasoning": {"effort": "none"}},
    {"reasoning": {"enabled": False}},
    {"thinking": {"type": "disabled"}},
    {"enable_thinking": False},
    {"enable_thinking": False, "thinking": {"type": "disabled"}, "reasoning_effort": "none"},
    {"chat_template_kwargs": {"enable_thinking": False, "thinking": False, "reasoning_effort": "none"}},
]
THINKING_ON: list[dict[str, Any]] = [
    {"reasoning_effort": "medium"},
    {"reasoning": {"effort": "medium", "enabled": True}},
    {"reasoning": {"enabled": True}},
    {"thinking": {"type": "enabled", "budget_tokens": 1024}},
    {"enable_thinking": True},
]
CONTRADICTIONS: list[tuple[str, dict[str, Any]]] = [
    ("thinking", {"thinking": {"type": "disabled"}, "reasoning_effort": "high"}),
    ("enable_thinking", {"enable_thinking": True, "reasoning": {"effort": "none"}}),
    ("thinking", {"enable_thinking": True, "thinking": {"type": "disabled"}}),
    ("reasoning.effort", {"reasoning": {"effort": "low"}, "reasoning_effort": "high"}),
    ("reasoning.max_tokens", {"reasoning": {"max_tokens": 1000}}),
]


def test_each_name_of_the_switch_for_reasoning_is_read_in_chats(with_tools: SharedGateway) -> None:
    path, _, asked = APIS["chats"]

    async def scenario(at: Served) -> None:
        async def prompt_of(body: dict[str, Any]) -> Any:
            return (await seen_of(at, path, {"model": "demo"} | asked | body))[1]

        plain = await prompt_of({})
        for bodies in (THINKING_OFF, THINKING_ON):
            expected = await prompt_of(bodies[0])
            assert expected != plain
            for body in bodies:
                assert await prompt_of(body) == expected, body
                counted = await at.post("/tokenize", {"messages": asked["messages"]} | body)
                assert counted.json()["tokens"] == expected[0][0], counted.text
                assert "x-ignored-parameters" not in counted.headers
        assert await prompt_of(THINKING_OFF[0]) != await prompt_of(THINKING_ON[0])
        for name, body in CONTRADICTIONS:
            for each in (path, "/tokenize"):
                response = await at.post(each, {"model": "demo", "messages": asked["messages"]} | body)
                assert response.status_code == 400, response.text
                assert response.json()["error"]["message"].startswith(f"{name}: ")

    with_tools.play(scenario)


def test_a_chat_without_its_reasoning_is_asked_for_in_openrouters_way() -> None:
    async def scenario() -> None:
        router = ScriptedRouter(answer=answer_of("Hm.</think>far"))
        async with served(router, model=model_with(DEEPSEEK)) as at:
            for exclude, thoughts in ((True, None), (False, "Hm.")):
                body = {"messages": QUESTION, "reasoning": {"exclude": exclude}}
                message = (await at.post("/v1/chat/completions", body)).json()["choices"][0]["message"]
                assert (message["content"], message.get("reasoning_content")) == ("far", thoughts)

    play(scenario)


def test_tokens_of_log_probabilities_may_be_named_by_their_ids(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        named = {"model": "demo", "return_tokens_as_token_ids": True}
        expected = [f"token_id:{token}" for token in answer_of("one two three")]
        asked = {"messages": QUESTION, "logprobs": True, "top_logprobs": 1} | named
        chat = (await at.post("/v1/chat/completions", asked)).json()["choices"][0]["logprobs"]["content"]
        assert [each["token"] for each in chat] == expected
        assert [each["top_logprobs"][0]["token"] for each in chat] == expected
        asked = {"prompt": "x", "logprobs": 1} | named
        found = (await at.post("/v1/completions", asked)).json()["choices"][0]["logprobs"]
        assert found["tokens"] == expected
        assert [next(iter(each)) for each in found["top_logprobs"]] == expected

    gateway.play(scenario)


def test_a_tool_list_may_be_empty(with_tools: SharedGateway) -> None:
    path, _, asked = APIS["chats"]

    async def scenario(at: Served) -> None:
        plain = await seen_of(at, path, {"model": "demo"} | asked)
        for choice in ({}, {"tool_choice": "none"}, {"tool_choice": "auto"}):
            assert await seen_of(at, path, {"model": "demo", "tools": []} | choice | asked) == plain
        for wrong in ("required", {"type": "function", "function": {"name": "clock"}}):
            body = {"model": "demo", "tools": [], "tool_choice": wrong} | asked
            response = await at.post(path, body)
            assert response.status_code == 400 and "there are no tools" in response.text

    with_tools.play(scenario)
