"""What clients send that this server does not know: ignored and named, or refused where the answer would be another."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest

from alignedserve.gateway.http.fields import MAX_UNKNOWN
from alignedserve.gateway.openai.bodies import ChatBody
from alignedserve.gateway.telemetry.metrics import (
    IGNORED_HEADER,
    IGNORED_NAMES,
    MAX_LOGGED,
    IgnoredParameters,
)
from tests.gateway.scripted import TOKENIZER
from tests.gateway.served import QUESTION, Served, SharedGateway, play, served
from tests.gateway.tools.test_tools import model_with

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
UNKNOWN = {"new_in_2027": 1, "stream_options": {"newer": True}, "stream": True}


def events_of(text: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_unknown_is_ignored_and_named(path: str, caplog: pytest.LogCaptureFixture) -> None:
    body = {"messages": QUESTION} if path == CHAT else {"prompt": "How far?"}
    caplog.set_level(logging.INFO, "alignedserve.gateway.telemetry.metrics")

    async def scenario() -> None:
        async with served() as at:
            for _ in range(2):
                response = await at.post(path, body | UNKNOWN)
                assert response.status_code == 200
                assert response.headers[IGNORED_HEADER] == "new_in_2027, stream_options.newer"
            response = await at.post(path, body | {"priority": 5, "x y": 1})
            assert response.headers[IGNORED_HEADER] == "priority" and response.json()["choices"]
            assert IGNORED_HEADER not in (await at.post(path, body)).headers
            metrics = (await at.http.get("/metrics")).text
            assert 'alignedserve:ignored_parameters_total{parameter="priority"} 1.0' in metrics
            assert 'alignedserve:ignored_parameters_total{parameter="other"} 3.0' in metrics

    play(scenario)
    logged = [
        record.getMessage().split(":")[0]
        for record in caplog.records
        if record.name.endswith("telemetry.metrics")
    ]
    assert logged == ["new_in_2027", "stream_options.newer", "priority"]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, "/v1/embeddings"])
def test_an_unknown_field_of_slo_is_refused_and_named(path: str) -> None:
    """No other server has `slo`, so it is a mistake, and the objective would be another."""
    bodies: dict[str, dict[str, Any]] = {CHAT: {"messages": QUESTION}, COMPLETIONS: {"prompt": "How far?"}}
    body = bodies.get(path, {"input": "How far?"})

    async def scenario() -> None:
        async with served() as at:
            for slo in ({"ttft": 300}, {"ttft_ms": 300, "ttft": None}):
                response = await at.post(path, body | {"slo": slo})
                assert response.status_code == 400
                error = response.json()["error"]
                assert (
                    error["message"] == "slo.ttft: must be one of ttft_ms, tbt_ms" and error["param"] == "slo"
                )
            long = await at.post(path, body | {"slo": {"x" * 10_000: 1}})
            assert long.status_code == 400 and len(long.text) < 1000
            assert not at.router.submitted

    play(scenario)


def test_the_log_does_not_grow_with_what_clients_think_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    ignored = IgnoredParameters()
    for number in range(2 * MAX_LOGGED):
        assert ignored.note([f"p{number}"]) == {IGNORED_HEADER: f"p{number}"}
    assert len(caplog.records) == MAX_LOGGED and ignored.counts == {"other": 2 * MAX_LOGGED}
    assert ignored.note(["line\nbreak"]) == {IGNORED_HEADER: "other"} and ignored.note([]) == {}


def test_the_metric_names_what_a_chat_ignores() -> None:
    assert IGNORED_NAMES.isdisjoint(ChatBody.model_fields)


TOOL = {"name": "weather", "parameters": {"type": "object", "properties": {}}}
# With tools that the model may call.
WITH_TOOLS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION, "tools": [{"type": "function", "function": TOOL}]},
    "/v1/responses": {"input": QUESTION, "tools": [{"type": "function", **TOOL}], "tool_choice": "auto"},
    "/v1/messages": {
        "messages": QUESTION,
        "max_tokens": 50,
        "tools": [{"name": "weather", "input_schema": TOOL["parameters"]}],
    },
}


@pytest.mark.parametrize("path", WITH_TOOLS)
def test_tools_that_a_model_is_not_told_of_and_need_not_call_are_ignored(
    path: str, gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        plain = {name: value for name, value in WITH_TOOLS[path].items() if not name.startswith("tool")}
        for body in (plain, WITH_TOOLS[path]):
            response = await at.post(path, {"model": "demo"} | body)
            assert response.status_code == 200, response.text
            assert "one two three" in response.text
        assert response.headers[IGNORED_HEADER] == "tools"
        one, other = at.router.submitted
        assert one.request.prompt == other.request.prompt
        assert other.request.params.structured_outputs is None

    gateway.play(scenario)


@pytest.mark.parametrize("path", WITH_TOOLS)
def test_a_strict_server_refuses_them(path: str) -> None:
    async def scenario() -> None:
        async with served(strict_parameters=True) as at:
            response = await at.post(path, {"model": "demo"} | WITH_TOOLS[path])
            assert response.status_code == 400 and "tools" in response.json()["error"]["message"]
            assert at.router.submitted == []

    play(scenario)


def test_a_strict_server_refuses_what_it_does_not_know() -> None:
    async def scenario() -> None:
        async with served(strict_parameters=True) as at:
            for path, body, param in (
                (CHAT, {"messages": QUESTION, "new_in_2027": 1}, "new_in_2027"),
                (CHAT, {"messages": QUESTION, "stream": True, "stream_options": {"x": 1}}, "stream_options"),
                (COMPLETIONS, {"prompt": "x", "top_pp": 1}, "top_pp"),
                ("/tokenize", {"prompt": "x", "promt": 1}, "promt"),
            ):
                response = await at.post(path, body)
                assert (response.status_code, response.json()["error"]["param"]) == (400, param)
                assert "unknown, or not supported" in response.text

    play(scenario)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"modalities": ["text", "audio"]}, "modalities"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"guided_regex": "a+"}, "guided_regex"),
        ({"grammar": 'root ::= "a"'}, "grammar"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"web_search_options": {"x": 1}}, "web_search_options"),
        ({"p" * (number + 1): 1 for number in range(MAX_UNKNOWN + 1)}, "p" * (MAX_UNKNOWN + 1)),
        ({"temperature": -1}, "temperature"),
        ({"n": "2"}, "n"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages",
        ),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    more: dict[str, Any], param: str, gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        response = await at.post(CHAT, {"messages": QUESTION} | more)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text

    gateway.play(scenario)


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 1000}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": None}], "messages[0].content: must be a string or list"),
        ([{"role": "user"}], "messages[0].content: must be a string or list"),
        ([*QUESTION, {"role": "system", "content": 5}], "messages[1].content: must be a string or list"),
        ([{"role": "assistant", "content": {}}, *QUESTION], "messages[0].content: must be a string or list"),
        (
            [{"role": "user", "content": [IMAGE]}],
            "messages[0].content: a part of type 'image_url' is not supported: the model takes text only",
        ),
        (
            [{"role": "user", "content": [{"type": "text"}]}],
            "messages[0].content: must be a string, or a list of parts of type text",
        ),
        ([*QUESTION, {"content": "x" * 500}], "messages[1]: messages of a chat must be objects with a role"),
    ],
)
def test_a_wrong_message_is_named_without_what_it_holds(
    messages: list[Any], message: str, gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        for path in (CHAT, "/tokenize"):
            response = await at.post(path, {"messages": messages})
            error = response.json()["error"]
            assert (response.status_code, error["message"], error["param"]) == (400, message, "messages")

    gateway.play(scenario)


def test_a_template_speaks_for_itself_and_jinja_does_not() -> None:
    async def scenario() -> None:
        for template, reason in (
            ("{{ raise_exception('roles must alternate') }}", ": roles must alternate"),
            ("{{ messages[0].nothing.at_all }}", ""),
            ("{{ ''.__class__.__mro__ }}", ""),
            ("{{ 'x' + 5 }}", ""),
        ):
            async with served(model=model_with(template)) as at:
                message = (await at.post(CHAT, {"messages": QUESTION})).json()["error"]["message"]
                assert message == f"tokenizer: the chat template rejects these messages{reason}"

    play(scenario)


OTHER_TOOLS: dict[str, dict[str, Any]] = {
    "/v1/responses": {"input": "How far?"},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 50},
    "/v1/messages/count_tokens": {"messages": QUESTION},
}


@pytest.mark.parametrize("path", OTHER_TOOLS)
def test_the_header_does_not_grow_with_kinds_of_tools(path: str, gateway: SharedGateway) -> None:
    kinds = [{"type": f"kind_{number}", "name": "x"} for number in range(MAX_UNKNOWN + 1)]
    body = {"model": "demo"} | OTHER_TOOLS[path]

    async def scenario(at: Served) -> None:
        response = await at.post(path, body | {"tools": kinds[1:]})
        assert response.status_code == 200, response.text
        assert response.headers[IGNORED_HEADER].count("tools.kind_") == MAX_UNKNOWN
        for more in ({"tools": kinds}, {"tools": kinds[1:], "new_in_2027": 1}):
            response = await at.post(path, body | more)
            assert response.status_code == 400, response.headers
            message = response.json()["error"]["message"]
            assert message.startswith(f"tools.kind_{MAX_UNKNOWN}: unknown, or ignored"), message

    gateway.play(scenario)


def test_what_asks_for_nothing_is_no_reason_to_refuse() -> None:
    nothing = {
        "audio": None,
        "functions": [],
        "function_call": None,
        "use_beam_search": False,
        "modalities": ["text"],
        "verbosity": "low",
        "reasoning_effort": "minimal",
        "stream_options": None,
    }

    async def scenario() -> None:
        async with served() as at:
            response = await at.post(CHAT, {"messages": QUESTION} | nothing)
            assert response.status_code == 200 and IGNORED_HEADER not in response.headers, response.text

    play(scenario)


def test_each_chunk_can_have_the_usage_so_far() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}

    async def scenario() -> None:
        async with served() as at:
            body = {"messages": QUESTION, "stream": True, "stream_options": options}
            chunks = events_of((await at.post(CHAT, body)).text)
            counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
            assert counts == sorted(counts) and counts[-1] == counts[-2] > 1
            assert chunks[-1]["choices"] == []
            body["stream_options"] = {"include_usage": True}
            chunks = events_of((await at.post(CHAT, body)).text)
            assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)

    play(scenario)


def test_a_tokenised_text_is_told_what_was_ignored() -> None:
    async def scenario() -> None:
        async with served() as at:
            response = await at.post("/tokenize", {"prompt": "x", "new": 1})
            assert response.status_code == 200 and response.headers[IGNORED_HEADER] == "new"

    play(scenario)


def test_headers_of_other_gateways_are_understood() -> None:
    async def scenario() -> None:
        async with served() as at:
            headers = {
                "x-slo-ttft-ms": "700",
                "x-slo-tpot-ms": "70",
                "x-gateway-inference-objective": "Priority",
            }
            response = await at.http.post(CHAT, json={"messages": QUESTION}, headers=headers)
            assert response.json()["service_tier"] == "priority"
            request = at.router.submitted[0].request
            assert (request.tier, request.ttft_s, request.tbt_s) == ("rt", 0.7, 0.07)
            flex = {"x-gateway-inference-objective": "flex"}
            await at.http.post(CHAT, json={"messages": QUESTION}, headers=flex)
            assert at.router.submitted[1].request.tier == "be"
            # the body says otherwise, or the name is an operator's own
            body = {"messages": QUESTION, "service_tier": "default"}
            assert (await at.http.post(CHAT, json=body, headers=flex)).json()["service_tier"] == "default"
            own = {"x-gateway-inference-objective": "food-review"}
            response = await at.http.post(CHAT, json={"messages": QUESTION}, headers=own)
            assert response.json()["service_tier"] == "default"

    play(scenario)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "developer", "content": "Be brief."}, *QUESTION],
        [*QUESTION, {"role": "assistant", "content": None}, *QUESTION],
        [*QUESTION, {"role": "assistant"}, *QUESTION],
        [{"role": "user", "content": [{"type": "text", "text": "How"}, {"type": "text", "text": "far?"}]}],
        [
            *QUESTION,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "noon"}]},
        ],
    ],
)
def test_messages_have_every_form_that_clients_give_them(messages: Any, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        response = await at.post(CHAT, {"messages": messages})
        assert response.status_code == 200, response.text

    gateway.play(scenario)


@pytest.mark.parametrize("more", ["", "{# developer, tool #}"])
def test_roles_are_those_that_the_template_knows(more: str) -> None:
    template = "{% for m in messages %}{{ m.role }} {% endfor %}" + more
    messages = [{"role": "developer", "content": "x"}, *QUESTION, {"role": "tool", "content": "noon"}]

    async def scenario() -> None:
        async with served(model=model_with(template)) as at:
            await at.post(CHAT, {"messages": messages})
            prompt = TOKENIZER.decode(at.router.submitted[0].request.prompt)
            assert prompt == ("developer user tool " if more else "system user user ")

    play(scenario)
