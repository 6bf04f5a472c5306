"""schemathesis over the whole description, against a real gateway (`make fuzz` gives it more time), and odd values
that it does not draw."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from alignedserve.gateway.process import GatewayProcess
from tests.gateway.openai.test_changing_adapters import changing
from tests.gateway.served import Served, SharedGateway, served
from tests.gateway.tools.test_tools import TEMPLATE, model_with
from tests.store.redis_process import redis_running

CONFIG = Path(__file__).parent / "schemathesis.toml"
NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "8"))
# the systematic part alone takes a minute
PHASES = "examples,coverage,fuzzing,stateful" if "FUZZ_EXAMPLES" in os.environ else "examples,fuzzing"
# of all examples together, on a machine that has other things to do
TIMEOUT_S = 120 + 20 * NUM_EXAMPLES


async def fuzz(at: Served, directory: Path) -> tuple[int | None, str]:
    url = f"{at.http.base_url}/openapi.json"
    program = Path(sys.executable).parent / "schemathesis"
    command = [str(program), "--config-file", str(CONFIG), "run", url]
    options = ["--max-examples", str(NUM_EXAMPLES), "--continue-on-failure", "--no-color"]
    options += ["--phases", PHASES, "--generation-database", "none", "--workers", "1"]
    process = await asyncio.create_subprocess_exec(
        *command, *options, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=directory
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode, output.decode()


@pytest.mark.drawn(one_in=2)
@pytest.mark.slow
def test_nothing_that_can_be_sent_is_our_fault(tmp_path: Path) -> None:
    async def scenario() -> None:
        async with redis_running() as redis, changing(tmp_path, store_url=redis.url) as at:
            await at.router.until(lambda: list(at.router.hub) != [])
            code, output = await fuzz(at, tmp_path)
            assert code == 0, output[-8000:]
            # nothing is left of any of it
            await asyncio.wait_for(at.process.ending.drain_state.until_idle(), 20)
            assert at.router._open == {}
            assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200

    asyncio.run(scenario())


# What schemathesis does not draw: it holds to the types that are described, and what a route reads by itself, such as
# the blocks of a message, has none.
ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1e308,
    "",
    "\ud800",
    "x\udfff",
    [],
    [[]],
    {},
    {"type": {}},
    [{"type": "text"}],
)
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}
GOOD: list[tuple[str, dict[str, Any]]] = [
    (
        "/v1/chat/completions",
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}], "name": "n"},
                {"role": "assistant", "content": "y", "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "c", "content": "z"},
            ],
            "tools": [TOOL],
            "tool_choice": {"type": "function", "function": {"name": "f"}},
            "stop": ["a"],
            "logit_bias": {"5": 1},
            "max_tokens": 1,
            "user": "u",
            "metadata": {"a": "b"},
        },
    ),
    (
        "/v1/chat/completions",
        {
            "messages": [{"role": "user", "content": "x"}],
            "max_tokens": 1,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "object"}, "strict": True},
            },
            "stream_options": None,
            "seed": 1,
        },
    ),
    (
        "/v1/messages",
        {
            "model": "demo",
            "max_tokens": 1,
            "system": [{"type": "text", "text": "s"}],
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "x"}]},
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "t", "signature": "s"},
                        {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}},
                    ],
                },
                {
                    "role": "user",
                    "content": [
                        {
                            "type": "tool_result",
                            "tool_use_id": "c",
                            "content": [{"type": "text", "text": "z"}],
                        }
                    ],
                },
            ],
            "tools": [{"name": "f", "description": "d", "input_schema": {"type": "object"}}],
            "tool_choice": {"type": "tool", "name": "f"},
            "metadata": {"user_id": "u"},
            "stop_sequences": ["a"],
        },
    ),
    (
        "/v1/completions",
        {"prompt": ["x", "y"], "max_tokens": 1, "stop": ["a"], "logit_bias": {"5": 1}, "suffix": None},
    ),
    (
        "/v1/responses",
        {
            "model": "demo",
            "input": [
                {"role": "user", "content": [{"type": "input_text", "text": "x"}], "id": "msg_1"},
                {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "t"}]},
                {"type": "function_call", "id": "fc_1", "call_id": "c", "name": "f", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "c", "output": "z"},
            ],
            "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}, "strict": False}],
            "tool_choice": {"type": "function", "name": "f"},
            "reasoning": {"effort": None, "summary": None},
            "text": {"format": {"type": "text"}},
            "metadata": {"a": "b"},
            "user": "u",
            "max_output_tokens": 16,
            "store": False,
        },
    ),
    ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"a": 1}}),
    ("/v1/embeddings", {"input": ["x", "y"], "user": "u", "encoding_format": "float"}),
]
COUNTED = {key: value for key, value in GOOD[2][1].items() if key not in ("max_tokens", "metadata")}


def with_odd_values(value: Any) -> Iterator[Any]:
    """Yields the value with each part of it replaced by each odd value."""
    yield from ODD
    if isinstance(value, dict):
        for key, each in value.items():
            yield from ({**value, key: odd} for odd in with_odd_values(each))
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from ([*value[:place], odd, *value[place + 1 :]] for odd in with_odd_values(each))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("path", "body"), [*GOOD, ("/v1/messages/count_tokens", COUNTED)], ids=lambda given: str(given)[:30]
)
def test_no_odd_value_is_our_fault(path: str, body: dict[str, Any], with_tools: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        assert (await at.post(path, body)).status_code == 200
        faults = []
        for sent in with_odd_values(body):
            # A lone surrogate is written as an escape, as JSON allows.
            data = json.dumps(sent).encode()
            response = await at.http.post(path, content=data, headers={"content-type": "application/json"})
            if response.status_code >= 500:
                faults.append((response.status_code, data.decode()[:500], response.text[:200]))
        assert faults == []

    with_tools.play(scenario)


@pytest.fixture(scope="module")
def with_tools() -> Iterator[SharedGateway]:
    with SharedGateway.running(model=model_with(TEMPLATE), kind=GatewayProcess) as found:
        yield found


def test_errors_are_described_as_they_are() -> None:
    async def scenario() -> None:
        async with served() as at:
            described = (await at.http.get("/openapi.json")).json()
            for path, operations in described["paths"].items():
                for method, operation in operations.items():
                    answers = operation["responses"]
                    assert "422" not in answers and {"400", "401", "404", "413", "429", "503"} <= set(answers)
                    schema = answers["400"]["content"]["application/json"]["schema"]
                    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
                    assert schema == {"$ref": f"#/components/schemas/{name}"}, (method, path)
            assert "HTTPValidationError" not in json.dumps(described)

    asyncio.run(scenario())
