"""Embeddings, scores and rankings through the real gateway, in front of a scripted island that knows every vector."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import httpx2
import numpy as np
import pytest

from alignedserve.gateway.generation.generation import NUM_AT_ONCE
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.openai.embeddings import embedding
from alignedserve.gateway.openai.embeddings.bodies import MAX_INPUTS
from alignedserve.gateway.openai.embeddings.embedding import MAX_OPEN
from alignedserve.protocol.messages import Rejected, Submit
from alignedserve.protocol.pooling import DTYPE
from tests.gateway.batching import System
from tests.gateway.batching import play as play_batches
from tests.gateway.scripted import MODEL, TOKENIZER, ScriptedRouter, vector_of
from tests.gateway.served import Served, SharedGateway, play, served

assert MODEL.embedding_size
SIZE = MODEL.embedding_size


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def vectors_in(answer: httpx2.Response) -> np.ndarray:
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [each["index"] for each in data] == list(range(len(data)))
    return np.array([each["embedding"] for each in data])


def error_of(answer: httpx2.Response) -> tuple[int, str | None, str]:
    return answer.status_code, answer.json()["error"]["param"], answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("given", "prompts"),
    [
        ("how far", [ids_of("how far")]),
        (["a", "b"], [ids_of("a"), ids_of("b")]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ],
    ids=["text", "texts", "ids", "lists of ids"],
)
def test_each_input_gets_its_vector(given: Any, prompts: list[list[int]], gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        answer = await at.post("/v1/embeddings", {"input": given, "user": "u", "model": "demo"})
        expected = np.stack([vector_of(prompt) for prompt in prompts])
        np.testing.assert_array_equal(vectors_in(answer).astype(DTYPE), expected)
        num_tokens = sum(map(len, prompts))
        assert answer.json()["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert answer.json()["object"] == "list" and answer.json()["model"] == "demo"
        assert "x-ignored-parameters" not in answer.headers
        asked = [each.request for each in at.router.submitted]
        assert [(each.pooling, each.tier, each.tbt_s) for each in asked] == [("last", "rt", None)] * len(
            asked
        )

    gateway.play(scenario)


def test_openais_client_asks_for_base64_and_gets_numbers() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            found = await at.client.embeddings.create(model="demo", input=["one", "two"])
            for each, text in zip(found.data, ["one", "two"], strict=True):
                np.testing.assert_array_equal(np.array(each.embedding, DTYPE), vector_of(ids_of(text)))
            plain = await at.post("/v1/embeddings", {"input": "one", "encoding_format": "base64"})
            decoded = np.frombuffer(base64.b64decode(plain.json()["data"][0]["embedding"]), DTYPE)
            np.testing.assert_array_equal(decoded, vector_of(ids_of("one")))

    play(scenario)


def test_fewer_dimensions_are_the_first_ones_at_length_one() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            answer = await at.post("/v1/embeddings", {"input": "one", "dimensions": 3})
            first = vector_of(ids_of("one"))[:3]
            np.testing.assert_allclose(vectors_in(answer)[0], first / np.linalg.norm(first), atol=1e-6)

    play(scenario)


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, "input", "exactly one of input and messages must be given"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": []}, "input", "not empty"),
        ({"input": ["a", ""]}, "input", "must not be empty"),
        ({"input": [[1], []]}, "input", "not empty"),
        ({"input": [True]}, "input", "must be a text"),
        ({"input": [-1]}, "input", "outside the vocabulary"),
        ({"input": [10**30]}, "input", "flat list of integers"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input", "at most 2048"),
        ({"input": [1] * (MODEL.max_model_len + 1)}, "input", f"at most {MODEL.max_model_len}"),
        ({"input": "a", "dimensions": 0}, "dimensions", "greater than or equal to 1"),
        ({"input": "a", "dimensions": SIZE + 1}, "dimensions", f"at most {SIZE}"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "'float' or 'base64'"),
        ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "must be -1 or at least 1"),
        ({"input": "a", "service_tier": "flex", "slo": {"ttft_ms": 5}}, "slo", "best effort, which has"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, words: str, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        status, named, message = error_of(await at.post("/v1/embeddings", body))
        assert (status, named) == (400, param) and words in message
        assert not at.router.submitted

    gateway.play(scenario)


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_a_prompt_of_the_models_length_and_a_call_of_the_most_inputs() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            longest = [1] * MODEL.max_model_len
            assert vectors_in(await at.post("/v1/embeddings", {"input": longest})).shape == (1, SIZE)
            many = [[number % 50, number // 50] for number in range(MAX_INPUTS)]
            found = vectors_in(await at.post("/v1/embeddings", {"input": many, "service_tier": "flex"}))
            np.testing.assert_allclose(found[-1], vector_of(many[-1]), atol=1e-6)
            assert {each.request.tier for each in at.router.submitted[1:]} == {"be"}

    play(scenario)


def test_all_inputs_together_are_bounded() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter(), limits=CallLimits(max_call_tokens=10)) as at:
            status, named, message = error_of(await at.post("/v1/embeddings", {"input": [[1] * 6, [2] * 5]}))
            assert (status, named) == (400, "input") and "11 tokens in all; at most 10" in message

    play(scenario)


def test_lines_of_a_batch_are_embedded_as_best_effort() -> None:
    def line(number: int) -> dict[str, Any]:
        body = {"input": [[number, 1], [number]]}
        return {"custom_id": f"line {number}", "method": "POST", "url": "/v1/embeddings", "body": body}

    async def scenario(at: System) -> None:
        batch = await at.gateway.submit([line(number) for number in range(5)], url="/v1/embeddings")
        done = await at.gateway.until(batch, "completed")
        assert done.usage and (done.usage.input_tokens, done.usage.output_tokens) == (15, 0)
        found = await at.gateway.lines_of(done.output_file_id)
        assert [each["custom_id"] for each in found] == [f"line {number}" for number in range(5)]
        for number, each in enumerate(found):
            vectors = [item["embedding"] for item in each["response"]["body"]["data"]]
            right = np.stack([vector_of([number, 1]), vector_of([number])])
            np.testing.assert_array_equal(np.array(vectors, DTYPE), right)
        assert {submit.request.tier for submit in at.router.submitted} == {"be"}

    play_batches(scenario)


# ---- many at once ----------------------------------------------------------------------------------------------------


async def begun(at: Served, body: dict[str, Any], count: int) -> asyncio.Task[httpx2.Response]:
    """A call of which the router has so many requests, and answers none."""
    at.router.allowed = 0
    asking = asyncio.create_task(at.post("/v1/embeddings", body))
    await at.router.until(lambda: len(at.router.submitted) >= count)
    return asking


MANY = {"input": [[number] for number in range(100)]}


@pytest.mark.parametrize("tier", ["default", "flex"])
def test_a_call_has_a_bounded_number_of_requests_open(tier: str) -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            asking = await begun(at, {**MANY, "service_tier": tier}, MAX_OPEN)
            # Another call is answered meanwhile, and shows that no more came before it.
            at.router.allowed = None
            await at.post("/v1/embeddings", {"input": "x"})
            assert len(at.router.submitted) == MAX_OPEN + 1
            at.router.allow(None)
            assert len(vectors_in(await asking)) == 100

    play(scenario)


def test_a_client_that_leaves_ends_all_of_its_requests() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            asking = await begun(at, MANY, MAX_OPEN)
            asking.cancel()
            await at.router.until(lambda: len(at.router.aborted) == MAX_OPEN)
            assert not at.router._open and len(at.router.submitted) == MAX_OPEN
            await asyncio.wait_for(at.process.ending.drain_state.until_idle(), 20)

    play(scenario)


@pytest.mark.parametrize(("reason", "status"), [("full", 503), ("too_long", 400), ("slo", 400)])
def test_one_that_is_refused_fails_the_call_once_and_the_rest_is_aborted(reason: str, status: int) -> None:
    async def scenario() -> None:
        router = ScriptedRouter()
        router.allowed = 0

        def refuse(submit: Submit) -> Rejected | None:
            is_it = submit.request.prompt == [40]
            return Rejected(submit.request.key, reason, "no room") if is_it else None

        router.refuse = refuse
        async with served(router) as at:
            answer = await at.post("/v1/embeddings", MANY)
            assert answer.status_code == status and answer.json()["error"]["message"] == "no room"
            num_others = len(router.submitted) - 1
            await router.until(lambda: len(router.aborted) == num_others)
            assert not router._open

    play(scenario)


def test_one_that_fails_fails_the_call() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            asking = await begun(at, {"input": "x"}, 1)
            at.router.fail("NaN")
            answer = await asking
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == "embedding failed: NaN"

    play(scenario)


def test_a_new_router_is_asked_again() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            asking = await begun(at, {"input": [[1], [2]]}, 2)
            at.router.hub.close()
            at.router = ScriptedRouter(epoch=2)
            await at.router.hub.listen("127.0.0.1", at.router_port)
            assert len(vectors_in(await asking)) == 2

    play(scenario)


def test_the_time_to_the_answer_is_counted_as_that_to_a_first_token() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            answer = await at.post("/v1/embeddings", {"input": [[1, 2], [3]], "slo": {"ttft_ms": 60000}})
            assert answer.status_code == 200
            metrics = at.process.telemetry.metrics.of("rt")
            assert metrics.num_prompt_tokens == 3 and metrics.num_output_tokens == 0
            assert metrics.objectives["ttft", True] == 2 and not metrics.objectives["ttft", False]
            assert metrics.ended["stop"] == 2

    play(scenario)


# ---- scores and rankings ---------------------------------------------------------------------------------------------


def cosine(one: str, other: str) -> float:
    return float(np.dot(vector_of(ids_of(one)).astype(float), vector_of(ids_of(other)).astype(float)))


@pytest.mark.parametrize(
    ("text_1", "text_2", "pairs"),
    [
        ("a", "b", [("a", "b")]),
        ("a", ["b", "a"], [("a", "b"), ("a", "a")]),
        (["a", "b"], ["c", "d"], [("a", "c"), ("b", "d")]),
    ],
    ids=["one and one", "one and several", "pairs"],
)
def test_scores_are_cosines(
    text_1: Any, text_2: Any, pairs: list[tuple[str, str]], gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        answer = (await at.post("/v1/score", {"text_1": text_1, "text_2": text_2})).json()
        assert [each["index"] for each in answer["data"]] == list(range(len(pairs)))
        scores = [each["score"] for each in answer["data"]]
        np.testing.assert_allclose(scores, [cosine(*pair) for pair in pairs], atol=1e-6)
        assert answer["object"] == "list" and answer["usage"]["total_tokens"] > 0

    gateway.play(scenario)


def test_texts_that_are_no_pairs_are_refused() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            answer = await at.post("/v1/score", {"text_1": ["a", "b"], "text_2": ["c"]})
            assert error_of(answer)[:2] == (400, "text_1")

    play(scenario)


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank"])
def test_documents_are_sorted_by_relevance(path: str) -> None:
    documents = ["a", "b", "how far", "c"]
    in_order = sorted(range(4), key=lambda index: -cosine("how far", documents[index]))

    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            body = {"query": "how far", "documents": documents}
            results = (await at.post(path, body)).json()["results"]
            assert [each["index"] for each in results] == in_order and in_order[0] == 2
            assert [each["document"]["text"] for each in results] == [documents[i] for i in in_order]
            assert results[0]["relevance_score"] == pytest.approx(1.0)
            few = (await at.post(path, body | {"top_n": 2, "return_documents": False})).json()["results"]
            assert [each["index"] for each in few] == in_order[:2]
            assert all("document" not in each for each in few)
            all_of_them = (await at.post(path, body | {"top_n": 99})).json()["results"]
            assert len(all_of_them) == 4

    play(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": [""]}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": -1}, "top_n"),
        ({"query": "a", "documents": ["a"] * MAX_INPUTS}, "documents"),
    ],
    ids=str,
)
def test_a_ranking_without_sense_is_refused(body: dict[str, Any], param: str, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        assert error_of(await at.post("/v1/rerank", body))[:2] == (400, param)

    gateway.play(scenario)


def test_a_small_call_beside_a_large_one_is_not_computed_text_by_text() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            large = await begun(at, MANY, MAX_OPEN)
            small = asyncio.create_task(at.post("/v1/embeddings", {"input": [[200 + n] for n in range(20)]}))
            await at.router.until(lambda: len(at.router.submitted) == MAX_OPEN + NUM_AT_ONCE // 2)
            at.router.allowed = None
            at.router.allow(None)
            assert [len(vectors_in(each)) for each in await asyncio.gather(large, small)] == [100, 20]
            assert not any(embedding._in_real_time.values())

    play(scenario)


def test_a_call_that_has_begun_all_of_its_texts_leaves_its_share_to_others() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            at.router.allowed, num_small = 0, 8
            small = [asyncio.create_task(at.post("/v1/embeddings", {"input": "x"})) for _ in range(num_small)]
            await at.router.until(lambda: len(at.router.submitted) == num_small)
            # It begins more as long as all have room for as many as are begun at once.
            most = num_small + -(-(MAX_OPEN - NUM_AT_ONCE - num_small + 1) // NUM_AT_ONCE) * NUM_AT_ONCE
            large = await begun(at, MANY, most)
            at.router.allow(None)
            assert [len(vectors_in(await each)) for each in (*small, large)] == [1] * num_small + [100]
            assert not any(embedding._in_real_time.values())

    play(scenario)


def test_small_calls_that_have_begun_all_of_their_texts_count_for_the_bound() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            small, asking = {"input": [[number] for number in range(NUM_AT_ONCE)]}, []
            for num_calls in range(1, 25):
                asking.append(await begun(at, small, len(at.router.submitted) + 1))
                # Another call is answered meanwhile, and shows that no more came before it.
                at.router.allowed = None
                await at.post("/v1/embeddings", {"input": "x", "service_tier": "flex"})
                most = MAX_OPEN + sum(max(1, NUM_AT_ONCE // number) for number in range(2, num_calls + 1))
                assert len(at.router.submitted) - num_calls <= most
            at.router.allow(None)
            for each in asking:
                assert len(vectors_in(await each)) == NUM_AT_ONCE
            assert not any(embedding._in_real_time.values())

    play(scenario)


def test_calls_in_real_time_share_what_they_have_open() -> None:
    """Eight of 2,048 texts kept a chat from its first token for eight seconds."""

    async def scenario() -> None:
        async with served(ScriptedRouter()) as at:
            first = await begun(at, MANY, MAX_OPEN)
            others = [asyncio.create_task(at.post("/v1/embeddings", MANY)) for _ in range(3)]
            # The first has all, and of the others none knows of those that come later.
            await at.router.until(lambda: len(at.router.submitted) >= MAX_OPEN + 3 * (NUM_AT_ONCE // 4))
            # Another call is answered meanwhile, and shows that no more came before it.
            at.router.allowed = None
            await at.post("/v1/embeddings", {"input": "x"})
            most = sum(NUM_AT_ONCE // num_calls for num_calls in (2, 3, 4))
            assert len(at.router.submitted) <= MAX_OPEN + most + 1
            at.router.allow(None)
            for each in (await first, *(await asyncio.gather(*others))):
                assert len(vectors_in(each)) == 100
            assert not any(embedding._in_real_time.values())

    play(scenario)
