"""Bodies that are nested deeply, in every place where anything may stand: each is a call or is refused, and none is an
error of ours. What a schema's depth does to the process that compiles it is tested in text/."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from alignedserve.gateway.endpoints import ENDPOINTS
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.limits.limits import CallLimits
from tests.gateway.scripted import MODEL

# Pydantic gives up at 255, Python's parser of JSON at its limit of recursion, msgspec at another.
DEPTHS = (100, 254, 256, 400, 900, 990, 1100, 5000, 60_000)
HOLE = "THE DEEP VALUE"
TOOL = {"name": "f", "description": "d"}
SAID = {"role": "user", "content": "x"}
CHAT = {"messages": [SAID], "max_tokens": 1}
RESPONSE = {"input": [SAID]}
SCHEMA = {"type": "object", "properties": {"a": HOLE}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FORMAT = {"type": "json_schema", "name": "n", "schema": SCHEMA}

BODIES: dict[str, list[dict[str, Any]]] = {
    "/v1/chat/completions": [
        CHAT | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
        CHAT | {"structured_outputs": {"json": SCHEMA}},
        CHAT | {"tools": [{"type": "function", "function": TOOL | {"parameters": SCHEMA}}]},
        CHAT | {"tools": [{"type": "function", "function": TOOL | {"parameters": SCHEMA, "strict": True}}]},
        CHAT | {"chat_template_kwargs": {"x": HOLE}},
        CHAT | {"metadata": {"x": HOLE}},
        CHAT
        | {"messages": [SAID, {"role": "assistant", "content": None, "tool_calls": [CALL | {"x": HOLE}]}]},
        CHAT | {"unknown": HOLE},
    ],
    "/v1/completions": [
        {"prompt": "x", "structured_outputs": {"json": SCHEMA}},
        {"prompt": HOLE},
        {"prompt": "x", "unknown": HOLE},
    ],
    "/v1/responses": [
        RESPONSE | {"text": {"format": FORMAT}},
        RESPONSE | {"text": {"format": FORMAT, "x": HOLE}},
        RESPONSE | {"tools": [{"type": "function", "parameters": SCHEMA, "strict": True} | TOOL]},
        RESPONSE | {"tools": [{"type": "web_search", "x": HOLE}]},
        RESPONSE | {"tool_choice": HOLE},
        RESPONSE | {"metadata": {"x": HOLE}},
        RESPONSE | {"reasoning": {"effort": HOLE}},
        {"input": [SAID | {"x": HOLE}]},
        {"input": [{"type": "reasoning", "id": "r", "summary": HOLE}, SAID]},
        {"input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": HOLE}]}]},
        {"input": HOLE},
    ],
    "/v1/conversations": [
        {"items": [SAID | {"x": HOLE}]},
        {"items": [{"type": "reasoning", "id": "r", "summary": HOLE}]},
        {"items": HOLE},
        {"metadata": {"x": HOLE}},
    ],
    "/v1/messages": [
        CHAT | {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
        CHAT | {"output_format": {"type": "json_schema", "schema": SCHEMA}},
        CHAT | {"tools": [TOOL | {"input_schema": SCHEMA}]},
        CHAT | {"tools": [TOOL | {"input_schema": SCHEMA, "strict": True}], "tool_choice": {"type": "any"}},
        CHAT | {"tools": [TOOL | {"type": "web_search", "x": HOLE}]},
        CHAT | {"service_tier": HOLE},
        CHAT | {"thread": HOLE},
        CHAT | {"cache_control": {"x": HOLE}},
        CHAT | {"messages": [{"role": "user", "content": [{"type": "text", "text": HOLE}]}]},
        CHAT
        | {
            "messages": [
                SAID,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": HOLE}}],
                },
            ]
        },
        CHAT
        | {
            "messages": [
                {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": HOLE}]}
            ]
        },
    ],
}
BODIES["/v1/messages/count_tokens"] = [
    {name: value for name, value in body.items() if name != "max_tokens"} for body in BODIES["/v1/messages"]
]


def deep(depth: int) -> Iterator[str]:
    yield "[" * depth + "]" * depth
    yield '{"a":' * depth + "1" + "}" * depth
    yield '{"properties":{"a":' * (depth // 2) + "{}" + "}}" * (depth // 2)


@pytest.mark.parametrize("path", BODIES)
def test_a_deep_body_is_a_call_or_is_refused(path: str) -> None:
    endpoint, limits = ENDPOINTS[path], CallLimits()
    outcomes: set[str] = set()
    for body in BODIES[path]:
        for depth in DEPTHS:
            for value in deep(depth):
                data = json.dumps(body).replace(json.dumps(HOLE), value).encode()
                try:
                    made = endpoint.prepare(data, MODEL, limits)
                except ApiError as error:
                    assert error.status in (400, 404) and len(error.message) <= 1000
                    outcomes.add("refused")
                else:
                    # It crosses a process.
                    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=endpoint.made)
                    assert decoded == made
                    outcomes.add("made")
    assert outcomes == {"made", "refused"}
