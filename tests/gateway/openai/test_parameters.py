"""Parameters of vLLM and SGLang: which request they make of a call."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from alignedserve.gateway.limits.limits import MAX_CALL_TOKEN_IDS, CallLimits
from alignedserve.sampling_params import SamplingParams
from alignedserve.text.bad_words import with_bad_word_ids
from tests.gateway.scripted import MODEL, TOKENIZER
from tests.gateway.served import QUESTION, Served, SharedGateway

SCHEMA = {"type": "object", "properties": {}}
STRUCTURES: dict[str, Any] = {
    "structures": [{"begin": "<f", "schema": SCHEMA, "end": ">"}],
    "triggers": ["<f"],
}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "How far?"}),
    ("/v1/chat/completions", {"messages": QUESTION}),
    ("/v1/responses", {"input": "How far?"}),
    ("/v1/messages", {"messages": QUESTION, "max_tokens": 9}),
]


@pytest.mark.parametrize(("path", "body"), CALLS)
def test_what_limits_the_tokens_arrives(path: str, body: dict[str, Any], gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        given: dict[str, Any] = {
            "bad_words": ["two", " zz"],
            "allowed_token_ids": [5, 6],
            "truncate_prompt_tokens": 2,
        }
        whole = await at.post(path, body)
        answer = await at.post(path, body | given)
        assert answer.status_code == 200 and "x-ignored-parameters" not in answer.headers, answer.text
        before, after = (submit.request for submit in at.router.submitted)
        assert whole.status_code == 200
        assert after.params.allowed_token_ids == [5, 6]
        expected = with_bad_word_ids(SamplingParams(bad_words=given["bad_words"]), TOKENIZER).bad_word_ids
        assert after.params.bad_word_ids == expected and not after.params.bad_words
        assert after.prompt == before.prompt[-2:]

    gateway.play(scenario)


@pytest.mark.parametrize(("path", "body"), CALLS[:2])
def test_the_tokens_of_bad_words_are_limited_together(
    path: str, body: dict[str, Any], gateway: SharedGateway
) -> None:
    """Each of 64 choices has them."""

    async def scenario(at: Served) -> None:
        most = CallLimits().max_token_ids
        word = "z9" * 32
        num_tokens = len(TOKENIZER.encode(word))
        for num_words in (most // num_tokens, most // num_tokens + 1, most):
            answer = await at.post(path, body | {"n": 64, "max_tokens": 1, "bad_words": [word] * num_words})
            is_allowed = num_words * num_tokens <= most
            assert answer.status_code == (200 if is_allowed else 400), answer.text[:500]
            if not is_allowed:
                assert answer.json()["error"]["param"] == "bad_words", answer.text
        ids = [ids for submit in at.router.submitted for ids in submit.request.params.bad_word_ids or ()]
        assert len(at.router.submitted) == 64 and 0 < sum(map(len, ids)) <= 64 * most

    gateway.play(scenario)


@pytest.mark.parametrize(("path", "body"), CALLS[:2])
def test_token_ids_are_limited_together_for_all_choices(
    path: str, body: dict[str, Any], gateway: SharedGateway
) -> None:
    """Each choice has all of them, in a message of its own."""
    words = ["two"]
    num_of_words = sum(
        map(len, with_bad_word_ids(SamplingParams(bad_words=words), TOKENIZER).bad_word_ids or ())
    )
    lists = {
        "stop_token_ids": [5] * 20,
        "logit_bias": {str(each): 1 for each in range(20)},
        "bad_words": words,
    }

    async def scenario(at: Served) -> None:
        for num_more, status in ((0, 200), (1, 400)):
            allowed = [*range(MAX_CALL_TOKEN_IDS // 256 - 40 - num_of_words + num_more)]
            given = {**lists, "allowed_token_ids": allowed, "n": 256, "max_tokens": 1}
            answer = await at.post(path, body | given)
            assert answer.status_code == status, answer.text[:500]
        error = answer.json()["error"]
        assert error["param"] == "allowed_token_ids"
        assert f"{MAX_CALL_TOKEN_IDS + 256}; at most {MAX_CALL_TOKEN_IDS} are allowed" in error["message"]
        assert len(at.router.submitted) == 256

    gateway.play(scenario)


def test_token_ids_count_for_each_prompt(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        for num_prompts, status in ((64, 200), (65, 400)):
            body = {"prompt": ["x"] * num_prompts, "max_tokens": 1, "stop_token_ids": [5] * 1024}
            answer = await at.post("/v1/completions", body)
            assert answer.status_code == status, answer.text[:500]
        assert answer.json()["error"]["param"] == "stop_token_ids"

    gateway.play(scenario)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "one two " * 3000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "one two " * 3000}]}),
    ],
)
def test_a_prompt_that_is_too_long_is_cut(path: str, body: dict[str, Any], gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        refused = await at.post(path, body)
        assert refused.json()["error"]["code"] == "context_length_exceeded"
        answer = await at.post(path, body | {"truncate_prompt_tokens": -1, "max_tokens": 10})
        assert answer.status_code == 200, answer.text
        [submit] = at.router.submitted
        assert len(submit.request.prompt) == MODEL.max_model_len - 10

    gateway.play(scenario)


@pytest.mark.parametrize(("path", "body"), CALLS)
@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"regex": "[0-9]+"}, "regex"),
        ({"ebnf": 'root ::= "a"'}, "grammar"),
        ({"json_schema": SCHEMA}, "json"),
        ({"json_schema": '{"type": "object"}'}, "json"),
        ({"structured_outputs": {"structural_tag": STRUCTURES}}, "structural_tag"),
    ],
)
def test_other_names_of_structured_outputs(
    path: str, body: dict[str, Any], given: dict[str, Any], kind: str, gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        answer = await at.post(path, body | given)
        assert answer.status_code == 200 and "x-ignored-parameters" not in answer.headers, answer.text
        [submit] = at.router.submitted
        assert submit.request.params.structured_outputs
        assert submit.request.params.structured_outputs.kind == kind

    gateway.play(scenario)


@pytest.mark.parametrize(("path", "body"), CALLS[:2])
@pytest.mark.parametrize("tag", [STRUCTURES, {"format": {"type": "regex", "pattern": "[a-z]+"}}])
def test_a_structural_tag(
    path: str, body: dict[str, Any], tag: dict[str, Any], gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        form = {"type": "structural_tag", **tag}
        answer = await at.post(path, body | {"response_format": form})
        assert answer.status_code == 200, answer.text
        [submit] = at.router.submitted
        assert submit.request.params.structured_outputs
        assert submit.request.params.structured_outputs.kind == "structural_tag"

    gateway.play(scenario)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"regex": "("}, "regex: "),
        ({"ebnf": "root :::"}, "ebnf: "),
        ({"json_schema": "{"}, "json_schema: "),
        ({"regex": "a", "ebnf": "b"}, "regex: not together with the other"),
        (
            {"regex": "a", "response_format": {"type": "json_object"}},
            "regex: not together with response_format",
        ),
        (
            {"regex": "a", "structured_outputs": {"regex": "a"}},
            "structured_outputs: not together with the other parameters of the output's form",
        ),
        (
            {"response_format": {"type": "structural_tag"}},
            "response_format: must have a format, or structures and triggers",
        ),
        ({"allowed_token_ids": []}, "allowed_token_ids=[]: must be at least one token id"),
        ({"allowed_token_ids": [100_000]}, "allowed_token_ids: token id 100000 is outside"),
        ({"allowed_token_ids": [5] * 1025}, "allowed_token_ids: 1025 entries; at most 1024 are allowed"),
        ({"bad_words": ["a"] * 1025}, "bad_words: 1025 entries; at most 1024 are allowed"),
        ({"bad_words": [""]}, "bad_words='': must be a non-empty string"),
        ({"bad_words": ["a" * 257]}, "bad_words: a string of 257 characters; at most 256 are allowed"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens=0: must be -1 or at least 1"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2: must be an integer: -1, or at least 1"),
    ],
)
def test_what_is_wrong_is_named(given: dict[str, Any], message: str, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        answer = await at.post("/v1/chat/completions", {"messages": QUESTION} | given)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["message"].startswith(message), error
        assert error["param"] == message.partition(":")[0].partition("=")[0]

    gateway.play(scenario)


def test_a_request_that_no_token_fits_ends_with_the_parameters_name(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        at.router.allow(0)
        asking = at.post("/v1/completions", {"prompt": "x", "allowed_token_ids": [5], "bad_words": ["y"]})
        task = asyncio.ensure_future(asking)
        await at.router.until(lambda: bool(at.router.submitted))
        at.router.fail("allowed_token_ids: the parameters leave no token")
        answer = await task
        at.router.allow(None)
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "allowed_token_ids")

    gateway.play(scenario)
