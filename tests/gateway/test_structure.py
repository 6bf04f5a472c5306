"""Structured outputs on their way in: what instances get, and what never gets there."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, Literal

import pydantic
import pytest

from alignedserve.gateway import compiler as compiler_module
from alignedserve.gateway.compiler import Compiler
from alignedserve.gateway.limits import Limits
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest
from tests.gateway.scripted import MODEL, TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.test_gateway import ASKED, QUESTION, play, served

CHAT = {"messages": QUESTION}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


class Person(pydantic.BaseModel):
    name: str
    mood: Literal["good", "bad"]


def test_openais_client_parses_into_a_model() -> None:
    async def scenario() -> None:
        said = '{"name": "Ada", "mood": "good"}'
        async with served(ScriptedRouter(answer=answer_of(said))) as at:
            done = await at.client.chat.completions.parse(
                model="demo", messages=ASKED, response_format=Person
            )
            assert done.choices[0].message.parsed == Person(name="Ada", mood="good")
            wanted = at.router.submitted[0].request.params.structured_outputs
            assert wanted is not None and wanted.kind == "json" and '"mood"' in wanted.text

    play(scenario)


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutputsParams(json_object=True)),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            StructuredOutputsParams(json=SCHEMA),
        ),
        ({"structured_outputs": {"json": SCHEMA}}, StructuredOutputsParams(json=SCHEMA)),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutputsParams(regex="a+")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, StructuredOutputsParams(choice=["a", "b"])),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, StructuredOutputsParams(grammar='start: "a"')),
    ],
)
def test_what_is_asked_for_gets_to_the_instances(
    fields: dict[str, Any], wanted: StructuredOutputsParams | None
) -> None:
    async def scenario() -> None:
        async with served() as at:
            assert (await at.post("/v1/chat/completions", CHAT | fields)).status_code == 200
            assert (await at.post("/v1/completions", {"prompt": "x"} | fields)).status_code == 200
            found = [submit.request.params.structured_outputs for submit in at.router.submitted]
            assert found == [wanted, wanted]

    play(scenario)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"response_format": {"type": "json"}}, "response_format", "response_format"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "?"}},
                }
            },
            "response_format",
            "response_format: Invalid type: ?",
        ),
        (
            {"structured_outputs": {"regex": "("}},
            "structured_outputs",
            "structured_outputs: at 1(8): invalid",
        ),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "unknown, or not supported"),
        (
            {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            "structured_outputs",
            "not together with response_format",
        ),
        ({"structured_outputs": {"regex": "a" * 101}}, "structured_outputs", "at most 100 are allowed"),
        ({"structured_outputs": {"choice": ["a" * 101]}}, "structured_outputs", "at most 100 are allowed"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"a" * 99: 1}},
                }
            },
            "response_format",
            "at most 100 are allowed",
        ),
    ],
)
def test_what_cannot_be_followed_is_refused(fields: dict[str, Any], param: str, message: str) -> None:
    async def scenario() -> None:
        async with served(limits=Limits(max_grammar_bytes=100)) as at:
            response = await at.post("/v1/chat/completions", CHAT | fields)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
            assert message in response.json()["error"]["message"]
            assert at.router.submitted == []

    play(scenario)


# llguidance works on it for half a minute, and can't be asked to stop
SLOW_PARTS = [{"type": "integer", "multipleOf": 131 + i} for i in range(500)]
SLOW: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"p{i}": {"allOf": [part, {"type": "integer", "multipleOf": 137}]}
        for i, part in enumerate(SLOW_PARTS)
    },
}


def test_what_takes_too_long_is_refused_and_ends_and_others_go_on_meanwhile() -> None:
    async def scenario() -> None:
        async with served(limits=Limits(grammar_timeout_s=0.5)) as at:
            body = CHAT | {"structured_outputs": {"json": SLOW}}
            asking = asyncio.create_task(at.post("/v1/chat/completions", body))
            assert (await at.post("/v1/chat/completions", CHAT)).status_code == 200
            response = await asking
            assert response.status_code == 400
            assert response.json()["error"]["message"] == "structured_outputs: not compiled within 0.5 s"
            # nothing is left of it that the next one would wait for
            body = CHAT | {"structured_outputs": {"regex": "a"}}
            assert (await at.post("/v1/chat/completions", body)).status_code == 200

    play(scenario)


def test_who_gets_no_turn_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "TURN_S", 0.2)

    async def scenario() -> None:
        async with served(limits=Limits(grammar_timeout_s=20)) as at:
            quick = CHAT | {"structured_outputs": {"regex": "a"}}
            # with which the process starts
            assert (await at.post("/v1/chat/completions", quick)).status_code == 200
            slow = CHAT | {"structured_outputs": {"json": SLOW}}
            asking = asyncio.create_task(at.post("/v1/chat/completions", slow))
            while (response := await at.post("/v1/chat/completions", quick)).status_code == 200:
                # it came first; another one, which is not known yet
                quick["structured_outputs"]["regex"] += "a"  # type: ignore[index]
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            asking.cancel()

    play(scenario)


def test_the_compiler_survives_what_kills_its_process_and_keeps_what_it_knows() -> None:
    async def scenario() -> None:
        async with contextlib.aclosing(Compiler(TOKENIZER, MODEL.vocabulary)) as compiler:
            await compiler.prepare()
            known = StructuredOutputsParams(regex="a+")
            await compiler.check(known, 10)
            assert compiler._process
            compiler._process.kill()
            await compiler._process.wait()
            await compiler.check(known, 10)
            with pytest.raises(InvalidRequest, match="structured_outputs.regex: too large to be compiled"):
                await compiler.check(StructuredOutputsParams(regex="b+"), 10)
            await compiler.check(StructuredOutputsParams(regex="c+"), 10)
            # whoever leaves in the middle takes nobody's answer
            asking = asyncio.create_task(compiler.check(StructuredOutputsParams(regex="("), 10))
            await asyncio.sleep(0)
            asking.cancel()
            await compiler.check(StructuredOutputsParams(regex="d+"), 10)
            process = compiler._process
        assert process.returncode is not None

    play(scenario)


def test_a_model_without_text_has_no_grammars() -> None:
    async def scenario() -> None:
        compiler = Compiler(None, MODEL.vocabulary)
        with pytest.raises(InvalidRequest, match="needs a tokenizer and an end of sequence"):
            await compiler.check(StructuredOutputsParams(regex="a"), 1)
        await compiler.aclose()

    play(scenario)
