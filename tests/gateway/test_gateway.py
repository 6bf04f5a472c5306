"""The HTTP side on real sockets, with OpenAI's own client, in front of a scripted island."""

from __future__ import annotations

import asyncio
import json
import time
from itertools import pairwise
from typing import Any

import httpx2
import openai
import pytest

from alignedserve import demo
from alignedserve.engine.config import EngineConfig
from alignedserve.gateway.config import GatewayConfig, HttpConfig
from alignedserve.gateway.islands import island as island_module
from alignedserve.gateway.process import GatewayProcess
from alignedserve.process.listening import listen
from alignedserve.protocol import messages
from alignedserve.protocol.address import RouterAddress
from alignedserve.protocol.messages import Rejected, Request
from alignedserve.types import InstanceId
from tests.gateway.scripted import MODEL, TOKEN, TOKENIZER, ScriptedRouter, answer_of, process_status
from tests.gateway.served import (
    ASKED,
    GATEWAY,
    JSON,
    QUESTION,
    Served,
    SharedGateway,
    play,
    served,
    served_by,
)

# ---- answers ----


def test_a_completion_has_text_usage_and_reason() -> None:
    async def scenario() -> None:
        async with served() as at:
            done = await at.client.completions.create(model="demo", prompt="How far?", max_tokens=100)
            prompt = TOKENIZER.encode("How far?")
            assert done.object == "text_completion" and done.model == "demo"
            assert [choice.model_dump() for choice in done.choices] == [
                {"index": 0, "text": "one two three", "logprobs": None, "finish_reason": "stop"}
            ]
            assert done.usage and (done.usage.prompt_tokens, done.usage.completion_tokens) == (
                len(prompt),
                len(answer_of("one two three")),
            )
            assert [submit.request.prompt for submit in at.router.submitted] == [prompt]

    play(scenario)


def test_a_chat_goes_through_the_template_and_has_no_limit_of_its_own() -> None:
    async def scenario() -> None:
        async with served() as at:
            done = await at.client.chat.completions.create(model="demo", messages=QUESTION, temperature=0)  # type: ignore[arg-type]
            message = done.choices[0].message
            assert (message.role, message.content) == ("assistant", "one two three")
            request = at.router.submitted[0].request
            assert request.prompt == TOKENIZER.chat_ids(QUESTION)
            assert request.params.max_tokens is None and request.params.temperature == 0

    play(scenario)


def test_completions_stop_at_sixteen_tokens_by_default() -> None:
    async def scenario() -> None:
        async with served(
            ScriptedRouter(answer=TOKENIZER.encode("a b c d e f g h i j k l m n o p q r"))
        ) as at:
            done = await at.client.completions.create(model="demo", prompt="x")
            assert done.usage and done.usage.completion_tokens == 16
            assert done.choices[0].finish_reason == "length"

    play(scenario)


def test_streams_have_openais_shape() -> None:
    async def scenario() -> None:
        async with served() as at:
            body = {"model": "demo", "messages": QUESTION, "stream": True}
            body["stream_options"] = {"include_usage": True}
            response = await at.post("/v1/chat/completions", body)
            assert response.headers["content-type"].startswith("text/event-stream")
            *events, last = response.text.strip().split("\n\n")
            assert last == "data: [DONE]"
            chunks = [json.loads(event.removeprefix("data: ")) for event in events]
            assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
            assert len({chunk["id"] for chunk in chunks}) == 1
            assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert chunks[-2]["choices"][0] == {
                "index": 0,
                "delta": {},
                "logprobs": None,
                "finish_reason": "stop",
            }
            assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] > 0
            assert all(chunk["usage"] is None for chunk in chunks[:-1])
            text = "".join(
                chunk["choices"][0]["delta"].get("content", "") for chunk in chunks if chunk["choices"]
            )
            assert text == "one two three"

    play(scenario)


def test_a_token_is_streamed_when_it_comes() -> None:
    async def scenario() -> None:
        async with served() as at:
            at.router.allow(2)
            stream = await at.client.completions.create(model="demo", prompt="x", max_tokens=50, stream=True)
            texts = [(await anext(stream)).choices[0].text for _ in range(2)]
            assert "".join(texts) == TOKENIZER.decode(at.router.answer[:2])
            at.router.allow(None)
            rest = [chunk.choices[0].text async for chunk in stream]
            assert "".join(texts + rest) == "one two three"

    play(scenario)


def test_n_choices_of_several_prompts_have_seeds_of_their_own() -> None:
    async def scenario() -> None:
        async with served() as at:
            body = {"prompt": ["a", "b"], "n": 2, "seed": 3, "max_tokens": 50}
            done = (await at.post("/v1/completions", body)).json()
            assert [choice["index"] for choice in done["choices"]] == [0, 1, 2, 3]
            submitted = [submit.request for submit in at.router.submitted]
            prompts = [request.prompt for request in submitted]
            assert prompts == [TOKENIZER.encode(text) for text in ("a", "a", "b", "b")]
            seeds = [request.seed for request in submitted]
            assert seeds[0] == seeds[2] == 3 and seeds[1] == seeds[3] != 3
            assert {request.params.n for request in submitted} == {1}

    play(scenario)


def test_without_a_seed_each_request_gets_one() -> None:
    async def scenario() -> None:
        async with served() as at:
            for _ in range(2):
                await at.post("/v1/completions", {"prompt": "a"})
            assert len({submit.request.seed for submit in at.router.submitted}) == 2

    play(scenario)


def test_a_server_started_anew_gives_the_same_seeds_and_other_keys() -> None:
    async def requests_of(seed: int) -> list[Request]:
        async with served(seed=seed) as at:
            await at.post("/v1/completions", {"prompt": ["a", "b"], "n": 2})
            await at.post("/v1/chat/completions", {"messages": QUESTION})
            return [submit.request for submit in at.router.submitted]

    async def scenario() -> None:
        first, again, other = [await requests_of(seed) for seed in (7, 7, 8)]
        assert [request.seed for request in first] == [request.seed for request in again]
        assert not {request.seed for request in first} & {request.seed for request in other}
        assert len({request.key for request in [*first, *again, *other]}) == 3 * 5

    play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_stop_string_ends_the_text_and_the_work(is_stream: bool) -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter(answer=TOKENIZER.encode("one two three four five six"))) as at:
            at.router.allow(len(TOKENIZER.encode("one two three four")))
            body = {"prompt": "x", "stop": [" three"], "max_tokens": 50, "stream": is_stream}
            response = await at.post("/v1/completions", body)
            assert texts_of(response, is_stream) == "one two"
            assert '"finish_reason":"stop"' in response.text
            await at.router.until(lambda: at.router.aborted != [])
            assert at.router.aborted == [at.router.submitted[0].request.key]

    play(scenario)


def texts_of(response: httpx2.Response, is_stream: bool) -> str:
    if not is_stream:
        text: str = response.json()["choices"][0]["text"]
        return text
    events = response.text.strip().split("\n\n")[:-1]
    return "".join(json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events)


def test_logprobs_of_completions_and_of_chats() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter(answer=answer_of("one two"))) as at:
            completion = await at.client.completions.create(
                model="demo", prompt="x", logprobs=2, max_tokens=50
            )
            found = completion.choices[0].logprobs
            tokens = [MODEL.token_text(token) for token in at.router.answer]
            assert found and found.tokens == tokens and found.token_logprobs == [-0.25] * len(tokens)
            assert found.top_logprobs and found.top_logprobs[0] == {
                tokens[0]: -0.25,
                MODEL.token_text(7): -2.0,
            }
            assert found.text_offset == [sum(map(len, tokens[:i])) for i in range(len(tokens))]
            chat = await at.client.chat.completions.create(
                model="demo", messages=ASKED, logprobs=True, top_logprobs=2
            )
            content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
            assert content and [token.token for token in content] == tokens
            assert content[0].bytes == list(tokens[0].encode()) and content[0].logprob == -0.25
            assert [top.logprob for top in content[0].top_logprobs] == [-0.25, -2.0]
            assert at.router.submitted[1].request.params.logprobs == 2

    play(scenario)


def test_the_bytes_of_tokens_make_the_text_where_characters_are_split() -> None:
    text = "\N{PARTY POPPER} \N{LATIN SMALL LETTER E WITH ACUTE}"

    async def scenario() -> None:
        async with served(ScriptedRouter(answer=answer_of(text))) as at:
            chat = await at.client.chat.completions.create(model="demo", messages=ASKED, logprobs=True)
            content = chat.choices[0].logprobs and chat.choices[0].logprobs.content
            assert content and content[0].token == "\N{REPLACEMENT CHARACTER}"
            said = b"".join(bytes(token.bytes or []) for token in content)
            assert said.startswith(text.encode()) and chat.choices[0].message.content == text

    play(scenario)


def test_models_are_listed() -> None:
    async def scenario() -> None:
        async with served() as at:
            assert [model.id async for model in await at.client.models.list()] == ["demo"]
            assert (await at.client.models.retrieve("demo")).id == "demo"
            with pytest.raises(openai.NotFoundError):
                await at.client.models.retrieve("else")

    play(scenario)


# ---- refusals ----

NO_PROMPTS: list[Any] = [[], [1.0], [[]], [[1], "x"], ["x", 1], {}, None, 5, True]


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("completions", {"prompt": "x", "top_p": 2}, 400, "top_p", "top_p=2.0: must be a number above 0"),
        ("completions", {"prompt": "x", "n": "2"}, 400, "n", "n: Input should be a valid integer"),
        ("completions", {}, 400, "prompt", "prompt: Field required"),
        *(
            (
                "completions",
                {"prompt": prompt},
                400,
                "prompt",
                "prompt: must be a text, token ids, or a list of",
            )
            for prompt in NO_PROMPTS
        ),
        ("completions", {"prompt": ""}, 400, "prompt", "prompt: empty"),
        ("completions", {"prompt": [5, 100_000]}, 400, "prompt", "token id 100000 is outside"),
        ("completions", {"prompt": "x", "max_tokens": 0}, 400, "max_tokens", "max_tokens=0: must be"),
        *(
            ("completions", {"prompt": "x", "logit_bias": {key: 1}}, 400, "logit_bias", "must be a token id")
            for key in ("a", "", "+5", "-5", "1_0", " 5", "5.0", "\u0665", "9" * 5000)
        ),
        (
            "completions",
            {"prompt": "x", "n": 3, "best_of": 2},
            400,
            "best_of",
            "best_of=2: must be at least n=3",
        ),
        (
            "completions",
            {"prompt": "x", "best_of": 2, "stream": True},
            400,
            "best_of",
            "not possible with stream",
        ),
        (
            "completions",
            {"prompt": "x", "slo": {"ttft_ms": 0}},
            400,
            "slo",
            "slo.ttft_ms=0.0: must be a number",
        ),
        ("completions", {"prompt": "x", "slo": {"tbt_ms": 1e9}}, 400, "slo", "from 1 to 60000"),
        (
            "completions",
            {"prompt": "x", "slo": {"tbt_ms": 50}, "service_tier": "flex"},
            400,
            "slo",
            "best effort, which has no objectives",
        ),
        ("completions", {"prompt": "x", "service_tier": "gold"}, 400, "service_tier", "service_tier"),
        (
            "completions",
            {"prompt": "x", "stream_options": {}},
            400,
            "stream_options",
            "only allowed with stream",
        ),
        ("completions", {"prompt": "x", "model": "else"}, 404, "model", "model='else': does not exist"),
        ("completions", {"prompt": "x " * 5000}, 400, "prompt", "prompt and output together may have 2048"),
        ("chat/completions", {"messages": []}, 400, "messages", "messages: List should have at least 1 item"),
        ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages", "objects with a role"),
        ("chat/completions", {"messages": QUESTION, "tools": [5]}, 400, "tools", "tools.0: Input should"),
        ("chat/completions", {"messages": QUESTION, "top_logprobs": 1}, 400, "top_logprobs", "logprobs=true"),
        (
            "chat/completions",
            {"messages": QUESTION, "logprobs": True, "top_logprobs": 21},
            400,
            "top_logprobs",
            "top_logprobs=21: must be",
        ),
        (
            "chat/completions",
            {"messages": QUESTION, "max_completion_tokens": 0},
            400,
            "max_completion_tokens",
            "max_completion_tokens=0: must be",
        ),
        (
            "chat/completions",
            {"messages": QUESTION, "chat_template_kwargs": {"messages": 1}},
            400,
            "chat_template_kwargs",
            "messages is not a variable",
        ),
        ("completions", {"prompt": "x", "best_of": 10**8}, 400, "best_of", "best_of=100000000: must be"),
    ],
)
def test_what_is_wrong_is_named(
    path: str, body: dict[str, Any], status: int, param: str, message: str, gateway: SharedGateway
) -> None:
    async def scenario(at: Served) -> None:
        response = await at.post(f"/v1/{path}", body)
        assert response.status_code == status
        error = response.json()["error"]
        assert error.keys() == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert message in error["message"]
        assert at.router.submitted == []

    gateway.play(scenario)


def test_no_message_says_where_the_model_lies() -> None:
    async def scenario() -> None:
        async with served() as at:
            body = {"messages": [{"role": "nobody", "content": "x"}]}
            message = (await at.post("/v1/chat/completions", body)).json()["error"]["message"]
            assert message.startswith("demo: the chat template rejects these messages")
            assert str(demo.MODEL_DIR) not in message

    play(scenario)


def test_what_cannot_be_encoded_is_refused_and_can_be_told() -> None:
    async def scenario() -> None:
        async with served() as at:
            for path, content in [
                ("completions", rb'{"prompt": "\ud800"}'),
                ("completions", rb'{"prompt": "x", "stop": "\ud800"}'),
                ("completions", rb'{"prompt": "x", "\ud800": 1}'),
                ("completions", rb'{"prompt": "x", "model": "\ud800"}'),
                ("completions", rb'{"prompt": "x", "max_tokens": 1e400}'),
                ("completions", b'{"prompt": "x", "max_tokens": 1%s}' % (b"0" * 40)),
                ("completions", b'{"prompt": "x", "top_k": 1%s}' % (b"0" * 40)),
                ("completions", b'{"prompt": [1%s]}' % (b"0" * 40)),
                ("completions", rb'{"prompt": "x", "structured_outputs": {"choice": ["\ud800"]}}'),
                ("completions", rb'{"prompt": "x", "structured_outputs": {"json": {"const": "\ud800"}}}'),
                ("completions", rb'{"prompt": "x", "logit_bias": {"\ud800": 1}}'),
                ("chat/completions", rb'{"messages": [{"role": "user", "content": "\ud800"}]}'),
                ("chat/completions", rb'{"messages": [{"role": "\ud800", "content": ""}]}'),
                ("chat/completions", b'{"messages": ' + b"[" * 100_000),
            ]:
                response = await at.http.post(f"/v1/{path}", content=content, headers=JSON)
                assert response.status_code in (400, 404), content[:80]
                assert response.json()["error"]["message"]
            assert at.router.submitted == []

    play(scenario)


def test_every_error_has_openais_envelope() -> None:
    async def scenario() -> None:
        async with served() as at:
            responses = [
                (404, await at.http.get("/nothing")),
                (405, await at.http.get("/v1/completions")),
                (400, await at.http.post("/v1/completions", content=b"{", headers=JSON)),
                (400, await at.http.post("/v1/completions", content=b"[]", headers=JSON)),
                # what a page of another site could send without asking
                (400, await at.http.post("/v1/completions", content=b'{"prompt": "x"}')),
            ]
            for status, response in responses:
                assert response.status_code == status, response.text
                assert response.json()["error"]["type"] == "invalid_request_error"
            assert at.router.submitted == []

    play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_full_queue_is_503_with_a_time_and_what_never_fits_is_400(is_stream: bool) -> None:
    async def scenario() -> None:
        async with served() as at:
            at.router.refuse = lambda submit: Rejected(submit.request.key, "full", "9 requests wait already")
            body = {"prompt": "x", "stream": is_stream, "n": 2}
            response = await at.post("/v1/completions", body)
            assert (response.status_code, response.headers["retry-after"]) == (503, "1")
            assert response.json()["error"]["message"] == "9 requests wait already"
            at.router.refuse = lambda submit: Rejected(submit.request.key, "too_long", "needs 9 blocks of 8")
            response = await at.post("/v1/completions", body)
            assert (response.status_code, response.json()["error"]["message"]) == (400, "needs 9 blocks of 8")

    play(scenario)


# ---- faults ----


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("allowed", [0, 2])
def test_a_client_that_hangs_up_aborts_its_requests(is_stream: bool, allowed: int) -> None:
    async def scenario() -> None:
        async with served() as at:
            at.router.allow(allowed)
            body = {"prompt": "x", "stream": is_stream, "n": 2, "max_tokens": 50}
            asking = asyncio.create_task(at.post("/v1/completions", body))
            await at.router.until(lambda: len(at.router.submitted) == 2)
            asking.cancel()
            await at.router.until(lambda: len(at.router.aborted) == 2)
            assert {submit.request.key for submit in at.router.submitted} == set(at.router.aborted)
            at.router.allow(None)
            # and the server goes on
            assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200

    play(scenario)


def test_a_failure_in_mid_stream_is_told_in_the_stream() -> None:
    async def scenario() -> None:
        async with served() as at:
            at.router.allow(2)
            stream = await at.client.completions.create(model="demo", prompt="x", stream=True)
            await anext(stream)
            at.router.fail("NaN logits")
            with pytest.raises(openai.APIError, match="generation failed: NaN logits"):
                async for _ in stream:
                    pass
            at.router.allow(None)
            at.router.allow(0)
            asking = asyncio.create_task(at.post("/v1/completions", {"prompt": "x"}))
            await at.router.until(lambda: len(at.router.submitted) == 2)
            at.router.fail("NaN logits")
            assert (await asking).status_code == 500

    play(scenario)


def test_streams_survive_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "RESUBMIT_S", 0.01)

    async def scenario() -> None:
        async with served() as at:
            at.router.allow(3)
            stream = await at.client.completions.create(model="demo", prompt="x", max_tokens=50, stream=True)
            seen = [(await anext(stream)).choices[0].text for _ in range(2)]
            first, answer = at.router.submitted[0], at.router.answer
            at.router.hub.close()
            at.router = ScriptedRouter(epoch=2)
            # its queue is full at first: what was taken once is not refused now
            refused: list[Rejected] = []

            def refuse_twice(submit: Any) -> Rejected | None:
                if len(refused) == 2:
                    return None
                refused.append(Rejected(submit.request.key, "full", "busy"))
                return refused[-1]

            at.router.refuse = refuse_twice
            await at.router.hub.listen("127.0.0.1", at.router_port)
            rest = [chunk.choices[0].text async for chunk in stream]
            assert "".join(seen + rest) == "one two three"
            assert [submit.request for submit in at.router.submitted] == [first.request] * 3
            assert at.router.submitted[-1].delivered == answer[:3]

    play(scenario)


def test_a_full_router_is_asked_again_ever_more_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands may ask it."""
    monkeypatch.setattr(messages, "RESUBMIT_S", 0.01)
    monkeypatch.setattr(messages, "MAX_DOUBLED", 2)

    async def scenario() -> None:
        async with served() as at:
            at.router.allow(1)
            stream = await at.client.completions.create(model="demo", prompt="x", max_tokens=50, stream=True)
            await anext(stream)
            at.router.hub.close()
            at.router = ScriptedRouter(epoch=2)
            times_s: list[float] = []

            def refuse_often(submit: Any) -> Rejected | None:
                times_s.append(time.monotonic())
                return Rejected(submit.request.key, "full", "busy") if len(times_s) < 6 else None

            at.router.refuse = refuse_often
            await at.router.hub.listen("127.0.0.1", at.router_port)
            assert [chunk.choices[0].text async for chunk in stream]
            for (before_s, after_s), least_s in zip(
                pairwise(times_s), (0.01, 0.02, 0.04, 0.04, 0.04), strict=True
            ):
                # The event loop's clock may be a little early.
                assert after_s - before_s > 0.9 * least_s

    play(scenario)


def test_who_asked_a_new_router_does_not_ask_it_again_for_the_sake_of_an_earlier_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(messages, "RESUBMIT_S", 1.0)

    async def scenario() -> None:
        async with served() as at:
            at.router.allow(1)
            stream = await at.client.completions.create(model="demo", prompt="x", max_tokens=50, stream=True)
            seen = (await anext(stream)).choices[0].text
            at.router.hub.close()
            at.router = ScriptedRouter(epoch=2)
            at.router.refuse = lambda submit: Rejected(submit.request.key, "full", "busy")
            await at.router.hub.listen("127.0.0.1", at.router_port)
            await at.router.until(lambda: len(at.router.submitted) == 1)
            at.router.hub.close()
            at.router = ScriptedRouter(epoch=3)
            at.router.allow(0)
            await at.router.hub.listen("127.0.0.1", at.router_port)
            await at.router.until(lambda: len(at.router.submitted) == 1)
            # the timer for the one that was busy
            await asyncio.sleep(1.1)
            assert len(at.router.submitted) == 1
            at.router.allow(None)
            assert seen + "".join([chunk.choices[0].text async for chunk in stream]) == "one two three"

    play(scenario)


def test_repeated_tokens_are_said_once() -> None:
    async def scenario() -> None:
        async with served() as at:
            at.router.allow(2)
            stream = await at.client.completions.create(
                model="demo", prompt="x", max_tokens=50, stream=True, logprobs=1
            )
            seen = [await anext(stream) for _ in range(2)]
            gateway, request, _ = at.router._open[at.router.submitted[0].request.key]
            at.router._open[request.key] = (gateway, request, 0)
            at.router.allow(None)
            chunks = seen + [chunk async for chunk in stream]
            assert "".join(chunk.choices[0].text for chunk in chunks) == "one two three"
            tokens = [chunk.choices[0].logprobs.tokens or [] for chunk in chunks if chunk.choices[0].logprobs]
            assert sum(map(len, tokens)) == len(at.router.answer)

    play(scenario)


def test_a_router_that_stays_away_fails_what_is_open_and_refuses_what_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario() -> None:
        async with served() as at:
            at.router.allow(2)
            stream = await at.client.completions.create(model="demo", prompt="x", stream=True)
            await anext(stream)
            monkeypatch.setattr(island_module, "PATIENCE_S", 0.1)
            at.router.hub.close()
            with pytest.raises(openai.APIError, match="the router is down"):
                async for _ in stream:
                    pass
            response = await at.post("/v1/completions", {"prompt": "x"})
            assert response.status_code == 503 and "retry-after" in response.headers
            assert (await at.http.get("/health")).status_code == 503
            at.router = ScriptedRouter(epoch=2)
            await at.router.hub.listen("127.0.0.1", at.router_port)
            await at.router.until(lambda: list(at.router.hub) != [])
            assert (await at.post("/v1/completions", {"prompt": "x"})).status_code == 200

    play(scenario)


def test_what_comes_waits_for_the_island_that_may_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario() -> None:
        routers = [ScriptedRouter(), ScriptedRouter()]
        async with served_by(routers) as at:
            for router in routers:
                await router.until(lambda router=router: list(router.hub) != [])  # type: ignore[misc]
            monkeypatch.setattr(island_module, "PATIENCE_S", 0.1)
            routers[1].hub.close()
            given_up = at.process._islands._islands[1]
            while not given_up.is_given_up:
                await asyncio.sleep(0.01)
            monkeypatch.setattr(island_module, "PATIENCE_S", 60.0)
            routers[0].hub.close()
            asking = [
                asyncio.create_task(at.post("/v1/completions", {"prompt": "x", "n": 3})) for _ in range(2)
            ]
            assert not (await asyncio.wait(asking, timeout=0.3))[0]
            at.router = ScriptedRouter(epoch=2)
            await at.router.hub.listen("127.0.0.1", at.router_port)
            assert [(await each).status_code for each in asking] == [200, 200]

    play(scenario)


# ---- state ----


def test_health_asks_the_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(island_module, "CLUSTER_TIMEOUT_S", 0.05)

    async def scenario() -> None:
        async with served() as at:
            await at.router.until(lambda: list(at.router.hub) != [])

            async def health() -> tuple[int, Any]:
                response = await at.http.get("/health")
                return response.status_code, response.json()

            assert await health() == (200, {"status": "ok"})
            processes = at.router.processes
            slow = process_status("decode")
            slow.stats.over_host = [InstanceId("prefill-0")]
            at.router.processes = [*processes, slow]
            assert await health() == (200, {"status": "ok", "over_host": ["prefill-0 to decode-0"]})
            at.router.processes = processes
            at.router.processes.append(process_status("decode", "down"))
            assert await health() == (200, {"status": "degraded", "down": ["decode-0"]})
            at.router.processes = [
                process_status("kvpool"),
                process_status("prefill"),
                process_status("decode", "down"),
            ]
            status, body = await health()
            assert (status, body["reason"]) == (503, "no decode process is up")
            at.router.answers_cluster = False
            status, body = await health()
            assert (status, body["reason"]) == (503, "the router does not answer")

    play(scenario)


def test_the_cluster_is_described_process_by_process() -> None:
    async def scenario() -> None:
        async with served() as at:
            await at.router.until(lambda: list(at.router.hub) != [])
            body = (await at.http.get("/v1/cluster")).json()
            assert body["requests"] == {"running": 0}
            assert body["processes"][0] == {
                "role": "kvpool",
                "instance_id": "kvpool-0",
                "epoch": 1,
                "started_s": 1795300000.0,
                "pid": 42,
                "state": "up",
                "blocks": {"used": 6, "free": 4},
                "requests": {"running": 1},
                "island": 0,
            }

    play(scenario)


def test_a_taken_port_and_a_missing_model_are_named() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"127.0.0.1:{port}: Address already in use"):
            listen("127.0.0.1", port)
    config = GatewayConfig(GATEWAY, (RouterAddress("127.0.0.1", 1, ""),), EngineConfig("/nothing"), "x")
    with pytest.raises(ValueError, match="model is '/nothing'"):
        GatewayProcess(config).run()


def test_gateways_of_one_name_hold_leases_by_names_of_their_own() -> None:
    """In containers of two hosts they have the same number of their process, too: here it is that of the tests."""
    address = RouterAddress("127.0.0.1", 1, TOKEN)
    config = GatewayConfig(GATEWAY, (address,), EngineConfig(str(demo.MODEL_DIR)), "demo", HttpConfig())
    holders = {GatewayProcess(config)._services.holder for _ in range(2)}
    assert len(holders) == 2 and all(each.startswith(f"{GATEWAY}-") for each in holders)


def test_what_a_lost_island_had_goes_on_at_another() -> None:
    async def scenario() -> None:
        routers = [ScriptedRouter(epoch=1), ScriptedRouter(epoch=2)]
        async with served_by(routers) as at:
            for router in routers:
                await router.until(lambda router=router: list(router.hub) != [])  # type: ignore[misc]
                router.allow(2)
            streams = [
                await at.client.completions.create(model="demo", prompt="x", max_tokens=50, stream=True)
                for _ in range(4)
            ]
            # by the number of open ones
            assert [len(router.submitted) for router in routers] == [2, 2]
            for router in routers:
                router.allow(None) if router is routers[1] else router.hub.close()
            for stream in streams:
                assert "".join([chunk.choices[0].text async for chunk in stream]) == "one two three"
            assert [submit.delivered for submit in routers[1].submitted[2:]] == [routers[0].answer[:2]] * 2
            health = await at.http.get("/health")
            assert (health.status_code, health.json()) == (200, {"status": "ok"})

    play(scenario)
