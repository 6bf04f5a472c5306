"""Structured outputs in requests: what reaches instances, and what is refused before."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any, Literal

import pydantic
import pytest

from alignedserve.gateway.grammars import compiler as compiler_module
from alignedserve.gateway.grammars.compiler import Compiler
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.process.child import NotStarted
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest
from tests.gateway.scripted import MODEL, TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import ASKED, QUESTION, Served, SharedGateway, play, served

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
    fields: dict[str, Any], wanted: StructuredOutputsParams | None, gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        assert (await at.post("/v1/chat/completions", CHAT | fields)).status_code == 200
        assert (await at.post("/v1/completions", {"prompt": "x"} | fields)).status_code == 200
        found = [submit.request.params.structured_outputs for submit in at.router.submitted]
        assert found == [wanted, wanted]

    gateway.play(scenario)


@pytest.fixture(scope="module")
def narrow() -> Iterator[SharedGateway]:
    with SharedGateway.running(limits=CallLimits(max_grammar_bytes=100)) as found:
        yield found


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
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "exactly one of"),
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
def test_what_cannot_be_followed_is_refused(
    fields: dict[str, Any], param: str, message: str, narrow: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        response = await at.post("/v1/chat/completions", CHAT | fields)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert message in response.json()["error"]["message"]
        assert at.router.submitted == []

    narrow.play(scenario)


# llguidance works on it for half a minute, and can't be asked to stop
SLOW_PARTS = [{"type": "integer", "multipleOf": 131 + i} for i in range(500)]
SLOW: dict[str, Any] = {
    "type": "object",
    "properties": {
        f"p{i}": {"allOf": [part, {"type": "integer", "multipleOf": 137}]}
        for i, part in enumerate(SLOW_PARTS)
    },
}


@pytest.mark.slow
def test_what_takes_too_long_is_refused_and_ends_and_others_go_on_meanwhile() -> None:
    async def scenario() -> None:
        async with served(limits=CallLimits(grammar_timeout_s=0.5)) as at:
            body = CHAT | {"structured_outputs": {"json": SLOW}}
            asking = asyncio.create_task(at.post("/v1/chat/completions", body))
            assert (await at.post("/v1/chat/completions", CHAT)).status_code == 200
            response = await asking
            assert response.status_code == 400
            assert response.json()["error"]["message"] == "structured_outputs: not compiled within 0.5 s"
            # nothing is left of it that the next one would wait for
            quick: dict[str, Any] = CHAT | {"structured_outputs": {"regex": "a"}}
            assert (await at.post("/v1/chat/completions", quick)).status_code == 200

    play(scenario)


@pytest.mark.slow
def test_ordinary_ones_do_not_wait_for_slow_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler_module, "TURN_S", 3)

    def slow(number: int) -> dict[str, Any]:
        return CHAT | {"structured_outputs": {"json": SLOW | {"title": str(number)}}}

    async def scenario() -> None:
        async with served(limits=CallLimits(grammar_timeout_s=25)) as at:
            asking = [
                asyncio.create_task(at.post("/v1/chat/completions", slow(number))) for number in range(2)
            ]
            # one of them has its turn at it; who waits for that is told to come again
            (refused,), (first,) = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
            assert (refused.result().status_code, refused.result().headers["retry-after"]) == (503, "1")
            for number in range(1, 4):
                quick = CHAT | {"structured_outputs": {"regex": "a" * number}}
                assert (await at.post("/v1/chat/completions", quick)).status_code == 200
            assert not first.done()
            first.cancel()

    play(scenario)


class Counting(Compiler):
    num_compiled = 0

    async def _compiled(self, *asked: Any) -> Any:
        self.num_compiled += 1
        return await super()._compiled(*asked)


def test_what_is_known_is_not_compiled_again() -> None:
    async def scenario() -> None:
        async with contextlib.aclosing(Counting(TOKENIZER, MODEL.vocabulary)) as compiler:
            same = StructuredOutputsParams(regex="a+")
            await asyncio.gather(*(compiler.check(same, 10) for _ in range(5)))
            assert compiler.num_compiled == 1
            slow = StructuredOutputsParams(json=SLOW)
            for _ in range(3):
                with pytest.raises(TimeoutError):
                    await compiler.check(slow, 0.2)
            # once in each lane
            assert compiler.num_compiled == 3

    play(scenario)


def test_what_another_owner_has_used_is_compiled_again() -> None:
    """The time, or a verdict that it takes too long, would tell what others use."""

    async def scenario() -> None:
        async with contextlib.aclosing(Counting(TOKENIZER, MODEL.vocabulary)) as compiler:
            same = StructuredOutputsParams(regex="a+")
            for owner in ("key:a", "key:b", "", "key:a"):
                await compiler.check(same, 10, owner)
            assert compiler.num_compiled == 3
            await asyncio.gather(*(compiler.check(same, 10, owner) for owner in ("key:c", "key:d")))
            assert compiler.num_compiled == 5

    play(scenario)


def test_the_compiler_survives_what_kills_its_process_and_keeps_what_it_knows() -> None:
    async def scenario() -> None:
        async with contextlib.aclosing(Compiler(TOKENIZER, MODEL.vocabulary)) as compiler:
            await compiler.prepare()
            assert compiler._process
            known = StructuredOutputsParams(regex="a+")
            await compiler.check(known, 10)
            process = (await compiler._process.started()).process
            process.kill()
            await process.wait()
            await compiler.check(known, 10)
            await compiler.check(StructuredOutputsParams(regex="b+"), 10)
            # what a grammar's child ends of is its own affair
            asking = asyncio.create_task(compiler.check(StructuredOutputsParams(json=SLOW), 25))
            process = (await compiler._process.started()).process
            while not compiler._long._is_taken or not (children := children_of(process.pid)):
                await asyncio.sleep(0.01)
            os.kill(children[0], signal.SIGKILL)
            with pytest.raises(InvalidRequest, match="structured_outputs.json: too large to be compiled"):
                await asking
            # whoever leaves in the middle takes nobody's answer
            asking = asyncio.create_task(compiler.check(StructuredOutputsParams(regex="("), 10))
            await asyncio.sleep(0)
            asking.cancel()
            await compiler.check(StructuredOutputsParams(regex="d+"), 10)
            assert process.returncode is None
            # and nothing outlives it
            slow = StructuredOutputsParams(json=SLOW | {"title": "again"})
            asking = asyncio.create_task(compiler.check(slow, 25))
            while not compiler._long._is_taken or not (children := children_of(process.pid)):
                await asyncio.sleep(0.01)
        assert process.returncode is not None
        with pytest.raises(asyncio.CancelledError):
            await asking
        while any(os.path.exists(f"/proc/{child}") for child in children):
            await asyncio.sleep(0.01)

    play(scenario)


def test_a_compiler_that_can_start_no_process_starts_one_later_and_none_once_it_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        compiler = Compiler(TOKENIZER, MODEL.vocabulary)
        wanted = StructuredOutputsParams(regex="a+")
        with monkeypatch.context() as patch:
            patch.setattr("alignedserve.process.child.sys.executable", "/nothing/here")
            with pytest.raises(OSError, match="/nothing/here"):
                await compiler.check(wanted, 10)
        await compiler.check(wanted, 10)
        # closed while its process starts
        assert compiler._process
        running = await compiler._process.started()
        running.process.kill()
        await running._reading
        starting = asyncio.create_task(compiler.prepare())
        while not compiler._process._starter._greeted:
            await asyncio.sleep(0.01)
        (process,) = compiler._process._starter._greeted
        await compiler.aclose()
        await starting
        assert process.returncode == -signal.SIGKILL
        with pytest.raises(NotStarted):
            await compiler._process.started()

    play(scenario)


def children_of(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as found:
        return [int(child) for child in found.read().split()]


def test_a_model_without_text_has_no_grammars() -> None:
    async def scenario() -> None:
        compiler = Compiler(None, MODEL.vocabulary)
        with pytest.raises(InvalidRequest, match="needs a tokenizer and an end-of-sequence token"):
            await compiler.check(StructuredOutputsParams(regex="a"), 1)
        await compiler.aclose()

    play(scenario)
