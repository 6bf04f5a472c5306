"""Adapters are models to clients: each API takes their names, and names them in its answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.gateway.scripted import MODEL
from tests.gateway.served import play, served

ADAPTED = replace(MODEL, adapters={"sql": "sql", "org/legal": "org/legal"})
CHAT = {"messages": [{"role": "user", "content": "Say it."}], "max_tokens": 5}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("chat/completions", CHAT),
    ("completions", {"prompt": ["one", "two"], "max_tokens": 5}),
    # More than is prepared on the event loop.
    ("completions", {"prompt": "ab " * 4000, "max_tokens": 5}),
    ("responses", {"input": "Say it.", "max_output_tokens": 16}),
    ("messages", CHAT),
    ("embeddings", {"input": ["one", "two"]}),
    ("score", {"text_1": "one", "text_2": "two"}),
]
each_call = pytest.mark.parametrize(
    ("path", "body"), CALLS, ids=lambda each: each if isinstance(each, str) else ""
)


@each_call
def test_the_model_field_chooses(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with served(model=replace(ADAPTED, max_model_len=20_000)) as at:
            for name, adapter in (("demo", ""), ("sql", "sql"), ("org/legal", "org/legal"), (None, "")):
                at.router.submitted.clear()
                asked = body if name is None else body | {"model": name}
                if path == "messages" and name is None:
                    continue
                answer = await at.post(f"/v1/{path}", asked)
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == (name or "demo")
                assert {each.request.adapter for each in at.router.submitted} == {adapter}

    play(scenario)


@each_call
def test_other_names_are_not_found(path: str, body: dict[str, Any]) -> None:
    async def scenario() -> None:
        async with served(model=ADAPTED) as at:
            answer = await at.post(f"/v1/{path}", body | {"model": "sq"})
            assert answer.status_code == 404
            message = "model='sq': does not exist; this server has 'demo', 'sql', 'org/legal'"
            assert answer.json()["error"]["message"] == message
            assert not at.router.submitted

    play(scenario)


@pytest.mark.slow
def test_models_are_listed_with_their_parent() -> None:
    async def scenario() -> None:
        async with served(model=ADAPTED) as at:
            listed = (await at.http.get("/v1/models")).json()["data"]
            # the base model has vLLM's fields too
            assert all(each["root"] == each["id"] for each in listed)
            assert [(each["id"], each["parent"]) for each in listed] == [
                *(("demo", None), ("sql", "demo"), ("org/legal", "demo"))
            ]
            for each in listed:
                assert (await at.http.get(f"/v1/models/{each['id']}")).json() == each
            assert (await at.http.get("/v1/models/sq")).status_code == 404
            streamed = await at.client.chat.completions.create(
                model="sql", messages=CHAT["messages"], stream=True
            )  # type: ignore[call-overload]
            assert {chunk.model async for chunk in streamed} == {"sql"}

    play(scenario)


def test_the_same_answer_is_expected_of_the_same_adapter_alone() -> None:
    prints = {ADAPTED.answering_as(name).system_fingerprint for name in ("", "sql", "org/legal")}
    assert len(prints) == 3 and ADAPTED.answering_as("").system_fingerprint == MODEL.system_fingerprint
