"""Small routes that clients of vLLM, SGLang and SageMaker call."""

from __future__ import annotations

import asyncio
import json
import subprocess
from typing import Any

import numpy as np
import pytest

from alignedserve.gateway.http.keys import owners_of
from alignedserve.version import __version__
from tests.clients.environments import python_of
from tests.gateway.scripted import MODEL, TOKENIZER, vector_of
from tests.gateway.served import QUESTION, Served, SharedGateway, play, served

# Prints what the harness finds by way of the server.
HARNESS = """
import json, sys
from lm_eval.utils import RemoteTokenizer, check_remote_tokenizer_support
url, messages = sys.argv[1], json.loads(sys.argv[2])
found = RemoteTokenizer(url + "/v1/completions", timeout=100)
ids = found.encode("How far?")
print(json.dumps({
    "works": check_remote_tokenizer_support(url + "/v1/completions", timeout=100),
    "ids": ids, "text": found.decode(ids),
    "eos": [found.eos_token, found.eos_token_id], "bos": found.bos_token,
    "chat": found.apply_chat_template(messages),
}))
"""


def test_what_the_server_is(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        assert (await at.http.get("/version")).json() == {"version": __version__}
        ping, health = await at.http.get("/ping"), await at.http.get("/health")
        assert ping.status_code == 200 and ping.json() == health.json()
        docs = await at.http.get("/docs")
        assert docs.status_code == 307 and docs.headers["location"] == "/openapi.json"

    gateway.play(scenario)


def test_ping_alone_needs_no_key_and_load_counts_what_the_caller_may_see() -> None:
    async def scenario() -> None:
        async with served(key_owners=owners_of(["one", "two"], None, ["operator"])) as at:
            at.router.allow(0)
            keys = ("one", "two", "operator")
            one, two, operator = ({"Authorization": f"Bearer {key}"} for key in keys)
            body = {"prompt": "x"}
            asking = asyncio.ensure_future(at.http.post("/v1/completions", json=body, headers=one))
            await at.router.until(lambda: bool(at.router.submitted))
            loads = [(await at.http.get("/load", headers=key)).json() for key in (one, two, operator)]
            assert loads == [{"server_load": 1}, {"server_load": 0}, {"server_load": 1}]
            for path in ("/version", "/load", "/tokenizer_info", "/docs"):
                assert (await at.http.get(path)).status_code == 401
            assert (await at.http.get("/ping")).status_code == 200
            at.router.allow(None)
            assert (await asking).status_code == 200

    play(scenario)


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"messages": QUESTION}, "chat.completion"),
        ({"prompt": "How far?"}, "text_completion"),
        ({"input": "How far?"}, "list"),
        ({"text_1": "a", "text_2": "b"}, "list"),
    ],
)
def test_an_invocation_is_a_call_of_its_kind(body: dict[str, Any], kind: str, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        answer = await at.post("/invocations", body)
        assert answer.status_code == 200 and answer.json()["object"] == kind, answer.text
        large = await at.post("/invocations", body | {"user": "x" * 300_000})
        assert large.status_code == 200, large.text
        stream = await at.post("/invocations", body | {"stream": True, "whatever": 1})
        assert "whatever" in stream.headers["x-ignored-parameters"]
        assert ("data: [DONE]" in stream.text) == (kind != "list")

    gateway.play(scenario)


def test_a_ranking_is_invoked_and_what_is_none_of_them_is_refused(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        ranking = await at.post("/invocations", {"query": "a", "documents": ["b", "c"]})
        assert len(ranking.json()["results"]) == 2
        bodies: list[Any] = [{}, {"x": 1}, []]
        for body in bodies:
            answer = await at.post("/invocations", body)
            assert answer.status_code == 400, answer.text
        # The error is that of the endpoint.
        answer = await at.post("/invocations", {"messages": QUESTION, "top_p": 2})
        assert answer.json()["error"]["param"] == "top_p"

    gateway.play(scenario)


def test_other_paths_of_the_same(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        texts = {"text_1": "a", "text_2": ["b", "c"]}
        for path, body in (("/tokenize", {"prompt": "a b"}), ("/detokenize", {"tokens": [9, 8]})):
            plain, other = await at.post(path, body), await at.post(f"/v1{path}", body)
            assert plain.status_code == other.status_code == 200 and plain.json() == other.json()
        plain, other = await at.post("/score", texts), await at.post("/v1/score", texts)
        assert plain.json()["data"] == other.json()["data"]

    gateway.play(scenario)


def test_the_tokenizer(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        found = (await at.http.get("/tokenizer_info")).json()
        assert found["eos_token"] == TOKENIZER.files.special_tokens["eos_token"]
        assert "bos_token" in found and found["model_max_length"] == MODEL.max_model_len
        assert found["chat_template"] == TOKENIZER.files.chat_templates["default"]
        added = found["added_tokens_decoder"]
        assert {
            int(token_id) for token_id, token in added.items() if token["special"]
        } == TOKENIZER.special_ids

    gateway.play(scenario)


def test_lm_evaluation_harness_tokenizes_by_way_of_the_server(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        command: list[Any] = [
            python_of("lm-eval"),
            "-c",
            HARNESS,
            str(at.http.base_url).rstrip("/"),
            json.dumps(QUESTION),
        ]
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        printed, _ = await process.communicate()
        found = json.loads(printed)
        eos = TOKENIZER.files.special_tokens["eos_token"]
        assert found == {
            "works": True,
            "ids": TOKENIZER.encode("How far?", add_special_tokens=False),
            "text": "How far?",
            "eos": [eos, TOKENIZER.eos_token_id],
            "bos": TOKENIZER.files.special_tokens.get("bos_token"),
            "chat": TOKENIZER.apply_chat_template(QUESTION),
        }

    gateway.play(scenario)


def test_pooled_states_are_embeddings(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        answer = (await at.post("/pooling", {"input": ["a", "b"]})).json()
        assert answer["object"] == "list" and answer["id"].startswith("pool-")
        assert [each["object"] for each in answer["data"]] == ["pooling"] * 2
        expected = [vector_of(TOKENIZER.encode(text)) for text in ("a", "b")]
        found = np.array([each["data"] for each in answer["data"]], dtype=np.float32)
        np.testing.assert_array_equal(found, np.stack(expected))
        short = (await at.post("/pooling", {"input": "a", "dimensions": 4})).json()["data"][0]["data"]
        assert len(short) == 4 and np.isclose(np.linalg.norm(short), 1)
        for name, value in (("task", "token_embed"), ("use_activation", False), ("normalize", False)):
            refused = await at.post("/pooling", {"input": "a", name: value})
            assert refused.status_code == 400 and refused.json()["error"]["param"] == name

    gateway.play(scenario)


def test_no_model_has_classes(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        answer = await at.post("/classify", {"input": "a"})
        assert answer.status_code == 400
        assert answer.json()["error"]["message"] == "the model has no classification head"

    gateway.play(scenario)


@pytest.mark.parametrize("path", ["/v1/embeddings", "/pooling"])
def test_a_chat_has_an_embedding(path: str, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        for given, is_begun in (({}, False), ({"add_generation_prompt": True}, True)):
            answer = await at.post(path, {"messages": QUESTION, **given})
            assert answer.status_code == 200, answer.text
            assert at.router.submitted[-1].request.prompt == TOKENIZER.chat_ids(QUESTION, is_begun)
        wrong: list[Any] = [{}, {"input": "a", "messages": QUESTION}]
        for body in wrong:
            refused = await at.post(path, body)
            assert refused.status_code == 400 and "exactly one of input and messages" in refused.text

    gateway.play(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "one two " * 3000}),
        ("/pooling", {"messages": [{"role": "user", "content": "one two " * 3000}]}),
        ("/v1/score", {"text_1": "one two " * 3000, "text_2": "b"}),
        ("/v1/rerank", {"query": "a", "documents": ["one two " * 3000]}),
    ],
)
def test_long_inputs_are_cut(path: str, body: dict[str, Any], gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        assert (await at.post(path, body)).json()["error"]["code"] == "context_length_exceeded"
        for kept, longest in ((3, 3), (-1, MODEL.max_model_len)):
            at.router.submitted.clear()
            answer = await at.post(path, body | {"truncate_prompt_tokens": kept})
            assert answer.status_code == 200, answer.text
            assert max(len(submit.request.prompt) for submit in at.router.submitted) == longest
        refused = await at.post(path, body | {"truncate_prompt_tokens": 0})
        assert refused.json()["error"]["param"] == "truncate_prompt_tokens"

    gateway.play(scenario)
