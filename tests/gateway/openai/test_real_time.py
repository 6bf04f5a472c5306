"""The rest of OpenAI's and vLLM's surface: service tiers and SLOs, echo, best_of, fingerprints, tokenizing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from alignedserve.gateway.limits.limits import SloConfig
from alignedserve.protocol.messages import NewTokens, Rejected, Request
from tests.gateway.scripted import MODEL, TOKENIZER, ScriptedRouter
from tests.gateway.served import QUESTION, Served, SharedGateway, play, served

CHAT = {"messages": QUESTION}


@pytest.mark.parametrize(
    ("asked", "answered", "tier"),
    [
        (None, "default", "rt"),
        ("auto", "default", "rt"),
        ("default", "default", "rt"),
        ("priority", "priority", "rt"),
        ("flex", "flex", "be"),
    ],
)
def test_a_service_tier_is_a_class_and_is_echoed(
    asked: str | None, answered: str, tier: str, gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        for path, body in (("completions", {"prompt": "x"}), ("chat/completions", CHAT)):
            answer = (await at.post(f"/v1/{path}", body | {"service_tier": asked})).json()
            assert answer["service_tier"] == answered
            assert answer["system_fingerprint"] == MODEL.system_fingerprint
            assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        assert {submit.request.tier for submit in at.router.submitted} == {tier}
        response = await at.post("/v1/chat/completions", CHAT | {"service_tier": asked, "stream": True})
        *events, _ = response.text.strip().split("\n\n")
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        assert {chunk["service_tier"] for chunk in chunks} == {answered}

    gateway.play(scenario)


def test_deadlines_come_in_the_body_or_in_headers() -> None:
    async def scenario() -> None:
        async with served() as at:
            headers = {"x-slo-ttft-ms": "800", "X-SLO-TBT-MS": "62.5"}
            await at.post("/v1/chat/completions", CHAT)
            await at.http.post("/v1/chat/completions", json=CHAT, headers=headers)
            await at.http.post("/v1/chat/completions", json=CHAT | {"slo": {"ttft_ms": 200}}, headers=headers)
            found = [(submit.request.ttft_s, submit.request.tbt_s) for submit in at.router.submitted]
            assert found == [(1.0, 0.1), (0.8, 0.0625), (0.2, 0.0625)]
            for value in ("soon", "nan", "0", "1_000", "+900", "1e3", "-5", "500.", ".5", ""):
                header = {"X-SLO-TTFT-MS": value}
                response = await at.http.post("/v1/chat/completions", json=CHAT, headers=header)
                assert response.status_code == 400
                assert response.json()["error"]["param"] == "X-SLO-TTFT-MS"

    play(scenario)


def test_a_tier_has_objectives_of_its_own_and_best_effort_none() -> None:
    async def scenario() -> None:
        async with served(slo=SloConfig(800.0, 0.0, 300.0, 20.0)) as at:
            await at.post("/v1/chat/completions", CHAT)
            await at.post("/v1/chat/completions", CHAT | {"service_tier": "priority"})
            await at.post(
                "/v1/chat/completions", CHAT | {"service_tier": "priority", "slo": {"ttft_ms": 900}}
            )
            await at.post("/v1/chat/completions", CHAT | {"service_tier": "flex"})
            found = [
                (submit.request.ttft_s, submit.request.tbt_s, submit.request.slo_defaults)
                for submit in at.router.submitted
            ]
            assert found == [
                (0.8, None, ["ttft_s", "tbt_s"]),
                (0.3, 0.02, ["ttft_s", "tbt_s"]),
                (0.9, 0.02, ["tbt_s"]),
                (None, None, []),
            ]
            assert all(0 <= submit.waited_s < 10 for submit in at.router.submitted)

    play(scenario)


@pytest.mark.parametrize("name", ["ttft_ms", "tbt_ms"])
@pytest.mark.parametrize("value", [0, -5, 0.5, "soon", True, 1e9, float("nan"), float("inf")])
def test_an_objective_out_of_range_is_named(name: str, value: Any, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        body = json.dumps(CHAT | {"slo": {name: value}})
        headers = {"Content-Type": "application/json"}
        response = await at.http.post("/v1/chat/completions", content=body, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "slo"
        assert not at.router.submitted

    gateway.play(scenario)


def test_an_objective_that_the_model_cannot_keep_is_named_with_what_is_possible() -> None:
    async def scenario() -> None:
        async with served() as at:
            said = "slo.tbt_ms=2: must be at least 7.5"
            at.router.refuse = lambda submit: Rejected(submit.request.key, "slo", said)
            response = await at.post("/v1/chat/completions", CHAT | {"slo": {"tbt_ms": 2}})
            assert response.status_code == 400
            assert response.json()["error"] == {
                "message": said,
                "type": "invalid_request_error",
                "param": "slo",
                "code": "slo_unattainable",
            }

    play(scenario)


@pytest.mark.parametrize("value", [-1.0, 0.5, float("nan"), 1e9])
def test_a_default_out_of_range_is_named(value: float) -> None:
    with pytest.raises(ValueError, match="slo_priority_tbt_ms=.*must be 0 or from 1"):
        SloConfig(priority_tbt_ms=value)


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_echo_begins_with_the_prompt(is_stream: bool, gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        body = {"prompt": ["a b", "c"], "n": 2, "echo": True, "max_tokens": 50}
        response = await at.post("/v1/completions", body | {"stream": is_stream})
        texts: dict[int, str] = {}
        if is_stream:
            for event in response.text.strip().split("\n\n")[:-1]:
                choice = json.loads(event.removeprefix("data: "))["choices"][0]
                texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
        else:
            texts = {choice["index"]: choice["text"] for choice in response.json()["choices"]}
        said = "one two three"
        assert texts == {0: f"a b{said}", 1: f"a b{said}", 2: f"c{said}", 3: f"c{said}"}

    gateway.play(scenario)


class Rated(ScriptedRouter):
    """Its answers are likely or not, in turn."""

    likelihood = (-3.0, -0.5, -2.0, -1.0, -0.1, -4.0)

    def _tokens(self, request: Request, news: NewTokens) -> NewTokens:
        number = [submit.request.key for submit in self.submitted].index(request.key)
        news.tokens = [TOKENIZER.encode("abcdef"[number])[0]]
        news.logprobs = [[self.likelihood[number], 1, {}]]
        return news


def test_the_best_of_several_are_given() -> None:
    async def scenario() -> None:
        async with served(Rated()) as at:
            body: dict[str, Any] = {"prompt": ["x", "y"], "n": 2, "best_of": 3, "max_tokens": 1}
            answer = (await at.post("/v1/completions", body)).json()
            assert [(each["index"], each["text"]) for each in answer["choices"]] == [
                (0, "b"),
                (1, "c"),
                (2, "e"),
                (3, "d"),
            ]
            assert all(each["logprobs"] is None for each in answer["choices"])
            assert answer["usage"]["completion_tokens"] == 6

    play(scenario)


def test_tokenize_and_detokenize_have_vllms_shape() -> None:
    async def scenario() -> None:
        async with served() as at:
            ids = TOKENIZER.encode("How far?")
            answer = await at.post("/tokenize", {"model": "demo", "prompt": "How far?"})
            assert answer.json() == {
                "count": len(ids),
                "max_model_len": 2048,
                "tokens": ids,
                "token_strs": None,
            }
            chat = await at.post("/tokenize", CHAT | {"return_token_strs": True})
            assert chat.json()["tokens"] == TOKENIZER.chat_ids(QUESTION)
            assert chat.json()["token_strs"] == [MODEL.token_text(i) for i in chat.json()["tokens"]]
            bare = await at.post("/tokenize", CHAT | {"add_generation_prompt": False})
            assert bare.json()["tokens"] == TOKENIZER.chat_ids(QUESTION, add_generation_prompt=False)
            assert (await at.post("/detokenize", {"tokens": ids})).json() == {"prompt": "How far?"}

    play(scenario)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("tokenize", {}, "prompt"),
        ("tokenize", {"prompt": "x"} | CHAT, "prompt"),
        ("tokenize", {"prompt": "x" * 1_000_000}, "prompt"),
        ("tokenize", {"prompt": "x", "model": "else"}, "model"),
        ("tokenize", {"messages": [{"role": "nobody", "content": ""}]}, "messages"),
        ("detokenize", {"tokens": [1 << 40]}, "tokens"),
        ("detokenize", {"tokens": [-1]}, "tokens"),
        ("detokenize", {"tokens": "x"}, "tokens"),
    ],
)
def test_what_cannot_be_tokenized_is_named(
    path: str, body: dict[str, Any], param: str, gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        response = await at.post(f"/{path}", body)
        assert response.status_code in (400, 404)
        assert response.json()["error"]["param"] == param

    gateway.play(scenario)


def test_a_long_text_is_tokenized_like_a_short_one() -> None:
    async def scenario() -> None:
        async with served() as at:
            text = "one two three, " * 1000
            assert (await at.post("/tokenize", {"prompt": text})).json()["tokens"] == TOKENIZER.encode(text)

    play(scenario)
