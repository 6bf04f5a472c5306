"""Bodies are read by processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from alignedserve.gateway.endpoints import ENDPOINTS
from alignedserve.gateway.generation import preparer as preparer_module
from alignedserve.gateway.generation.endpoint import Endpoint, Result
from alignedserve.gateway.generation.prepared import Prepared, ids_of
from alignedserve.gateway.generation.preparer import SMALL_BYTES, Preparer
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.limits import Limits
from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.openai.completions import CHAT as CHAT_ENDPOINT
from alignedserve.gateway.openai.completions import COMPLETIONS as COMPLETION_ENDPOINT
from alignedserve.gateway.openai.prepared import PreparedCompletion
from alignedserve.gateway.prepare_process import MODULE
from alignedserve.gateway.process import GatewayProcess
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.text.tokenizer_files import TokenizerFiles
from alignedserve.vopr.front_end.preparer_in_place import PreparerInPlace
from tests.gateway.scripted import MODEL, TOKENIZER
from tests.gateway.served import ASKED, JSON, QUESTION, play, served

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}

BODIES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "How far?"}),
    (COMPLETIONS, {"prompt": ["How far?", "x"], "n": 2, "best_of": 3, "echo": True, "logprobs": 1}),
    (COMPLETIONS, {"prompt": [[5, 6], [7]], "stop": ["a", "b"], "logit_bias": {"5": 1.5}, "seed": 7}),
    (CHAT, {"messages": QUESTION, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": QUESTION, "service_tier": "priority", "slo": {"ttft_ms": 5.5}, "cache_salt": "s"}),
    (CHAT, {"messages": QUESTION, "response_format": SCHEMA, "logprobs": True, "top_logprobs": 2}),
    ("/tokenize", {"messages": QUESTION, "return_token_strs": True}),
    ("/detokenize", {"tokens": [5, 6]}),
    (CHAT, {"messages": QUESTION, "newer": 1, "slo": {"tbt_ms": 5, "newer": 2}}),
]
WRONG: list[tuple[str, Any, str | None]] = [
    (CHAT, {"messages": [1]}, "messages"),
    (CHAT, {"messages": QUESTION, "tools": TOOLS, "tool_choice": "required"}, "tools"),
    (CHAT, {"messages": QUESTION, "model": "another"}, "model"),
    (CHAT, {"messages": QUESTION, "max_completion_tokens": -1}, "max_completion_tokens"),
    (COMPLETIONS, {"prompt": "x", "n": "y"}, "n"),
    (CHAT, {"messages": QUESTION, "documents": [{"text": "y"}]}, "documents"),
    (COMPLETIONS, {"prompt": [100_000]}, "prompt"),
    (COMPLETIONS, [], None),
    (COMPLETIONS, {"prompt": ["\ud800"]}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "\ud800"}]}, "messages"),
]


def prepare(path: str, data: bytes) -> Result:
    return ENDPOINTS[path].prepare(data, MODEL, Limits())


def told(call: Callable[[], Result]) -> object:
    try:
        return call()
    except ApiError as error:
        return error.status, error.body


@pytest.mark.slow
def test_the_process_says_what_is_made_of_a_body() -> None:
    async def scenario() -> None:
        preparer = Preparer(MODEL, Limits(), MODULE)
        try:
            long_name = (COMPLETIONS, {"prompt": "x", "\ud800" * 3000: 1})
            bodies = [*BODIES, *((endpoint, body) for endpoint, body, _ in WRONG), long_name]
            for endpoint, body in bodies:
                data = json.dumps(body).encode()
                ask = preparer.answer if endpoint.endswith("tokenize") else preparer.call
                try:
                    found: object = await ask(ENDPOINTS[endpoint], [data[:7], data[7:]], "")
                except ApiError as error:
                    found = error.status, error.body
                assert found == told(lambda e=endpoint, d=data: prepare(e, d))  # type: ignore[misc]
        finally:
            await preparer.aclose()

    play(scenario)


def test_what_is_wrong_is_named() -> None:
    for endpoint, body, param in WRONG:
        with pytest.raises(ApiError) as raised:
            prepare(endpoint, json.dumps(body).encode())
        assert raised.value.status in (400, 404) and raised.value.param == param


def test_prompts_are_what_was_sent() -> None:
    found = prepare(COMPLETIONS, b'{"prompt": ["How far?", "x"]}')
    assert isinstance(found, Prepared)
    assert list(map(ids_of, found.prompts)) == [TOKENIZER.encode("How far?"), TOKENIZER.encode("x")]


def listed(item: str, num_bytes: int = 1 << 20) -> str:
    return ",".join([item] * (num_bytes // (len(item) + 1)))


# Each of them held up everybody's streams for seconds.
HOSTILE: list[tuple[str, str, str]] = [
    (CHAT, f'{{"messages":[{listed("1")}]}}', "messages"),
    (CHAT, f'{{"messages":[{{}}],"stop_token_ids":[{listed("null")}]}}', "stop_token_ids"),
    (CHAT, f'{{"messages":[{{}}],"tools":[{listed("1")}]}}', "tools"),
    (CHAT, '{"messages":[{}],' + ",".join(f'"{n}":1' for n in range(100_000)) + "}", ""),
    (COMPLETIONS, f'{{"prompt":[{listed("[1]")}]}}', "prompt"),
    (
        COMPLETIONS,
        '{"prompt":"x","logit_bias":{' + ",".join(f'"{n}":1' for n in range(99_999)) + "}}",
        "logit_bias",
    ),
    ("/detokenize", f'{{"tokens":[{listed("null")}]}}', "tokens"),
    ("/tokenize", f'{{"messages":[{listed("1")}]}}', "messages"),
]


@pytest.mark.slow
def test_no_body_is_read_on_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_here(*_: object) -> Result:
        raise AssertionError("it is read on the event loop")

    monkeypatch.setattr(Endpoint, "prepare", not_here)

    async def scenario() -> None:
        async with served(kind=GatewayProcess) as at:
            for endpoint, body, param in HOSTILE:
                response = await at.http.post(endpoint, content=body.encode(), headers=JSON)
                error = response.json()["error"]
                assert response.status_code == 400 and (error["param"] or "").startswith(param), error
            # Others are answered by the same processes.
            response = await at.post(CHAT, {"messages": QUESTION, "user": "y" * SMALL_BYTES})
            assert response.status_code == 200, response.text
            assert (await at.post(COMPLETIONS, {"prompt": "x"})).status_code == 200

    play(scenario)


@pytest.mark.parametrize("most", [0, SMALL_BYTES], ids=["medium", "small"])
def test_streams_are_answered_by_way_of_it(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer_module, "SMALL_BYTES", most)

    async def scenario() -> None:
        async with served(kind=GatewayProcess) as at:
            stream = await at.client.chat.completions.create(
                model="demo",
                messages=ASKED,
                stream=True,
            )
            texts = [chunk.choices[0].delta.content or "" async for chunk in stream]
            assert "".join(texts) == "one two three"
            assert at.router.submitted[0].request.prompt == TOKENIZER.chat_ids(QUESTION)

    play(scenario)


def preparing(scenario: Callable[[Preparer], Awaitable[None]], model: ServedModel = MODEL) -> None:
    async def with_one() -> None:
        preparer = Preparer(model, Limits(), MODULE)
        try:
            await preparer.start()
            await scenario(preparer)
        finally:
            await preparer.aclose()

    play(with_one)


SHORT = json.dumps({"prompt": "x"}).encode()
LONG = json.dumps({"prompt": "x", "user": "y" * SMALL_BYTES}).encode()


def num_given(call: object) -> int:
    assert isinstance(call, PreparedCompletion)
    return call.num_given


def test_a_body_that_takes_too_long_ends_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(preparer: Preparer) -> None:
        monkeypatch.setattr(preparer_module, "TIMEOUT_S", 1e-6)
        with pytest.raises(ApiError, match="not read within"):
            await preparer.call(COMPLETION_ENDPOINT, [LONG], "")
        monkeypatch.undo()
        assert num_given(await preparer.call(COMPLETION_ENDPOINT, [LONG], "")) == 1

    preparing(scenario)


LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}{{ messages }}"
LOOPS_IF_TOLD = f"{{% if messages[0].content == 'hang' %}}{LOOPS}{{% endif %}}{{{{ messages[0].content }}}}"


def with_template(template: str) -> ServedModel:
    files = TokenizerFiles(TOKENIZER.backend, {}, {"default": template})
    return replace(MODEL, tokenizer=Tokenizer(files))


def chat(text: str) -> list[bytes]:
    return [json.dumps({"messages": [{"role": "user", "content": text}]}).encode()]


def test_a_template_that_hangs_costs_its_own_chats_only() -> None:
    async def scenario(preparer: Preparer) -> None:
        hanging = asyncio.create_task(preparer.call(CHAT_ENDPOINT, chat("hang"), ""))
        # It is among the medium ones when it has taken as long as a small one may.
        while not preparer._medium.child._at_work:
            await preparer.call(CHAT_ENDPOINT, chat("go on"), "")
        await preparer.call(CHAT_ENDPOINT, chat("go on"), "")
        assert not hanging.done()
        hanging.cancel()

    preparing(scenario, with_template(LOOPS_IF_TOLD))


def test_a_template_that_hangs_with_any_chat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer_module, "START_S", 0.2)

    async def scenario() -> None:
        async with contextlib.aclosing(Preparer(with_template(LOOPS), Limits(), MODULE)) as preparer:
            with pytest.raises(
                ValueError, match="chat template takes more than 0.2 s for chats of a few words"
            ):
                await preparer.start()
            # One that is started later fails its calls.
            with pytest.raises(ApiError, match="no process reads bodies") as raised:
                await preparer.call(CHAT_ENDPOINT, chat("x"), "")
            assert raised.value.status == 503

    play(scenario)


def test_a_template_that_takes_too_much_memory_costs_its_own_chats_only() -> None:
    async def scenario(preparer: Preparer) -> None:
        with pytest.raises(ApiError, match="rejects these messages: MemoryError"):
            await preparer.call(CHAT_ENDPOINT, chat("x"), "")
        assert num_given(await preparer.call(COMPLETION_ENDPOINT, [SHORT], "")) == 1

    preparing(scenario, with_template("{{ 'x' * 9999999999 }}"))


def test_a_tokenizer_without_a_token_for_every_word_is_not_refused() -> None:
    words = Backend(WordLevel({"x": 0, "<s>": 1}, unk_token="<unknown>"))
    with pytest.raises(Exception, match="WordLevel error"):
        words.encode("A")
    model = replace(MODEL, tokenizer=Tokenizer(TokenizerFiles(words, {}, {})))

    async def scenario(preparer: Preparer) -> None:
        assert num_given(await preparer.call(COMPLETION_ENDPOINT, [SHORT], "")) == 1

    preparing(scenario, model)


def test_whoever_kills_the_process_costs_nobody_a_call() -> None:
    async def scenario(preparer: Preparer) -> None:
        process = preparer._small.child._process
        assert process
        os.kill(process.pid, signal.SIGSTOP)
        asking = asyncio.create_task(preparer.call(COMPLETION_ENDPOINT, [SHORT], ""))
        while not preparer._small.child._at_work:
            await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGKILL)
        assert num_given(await asking) == 1

    preparing(scenario)


def test_whoever_gets_no_turn_is_told_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer_module, "TURN_S", 0.05)

    async def scenario(preparer: Preparer) -> None:
        process = preparer._small.child._process
        assert process
        os.kill(process.pid, signal.SIGSTOP)
        first = asyncio.create_task(preparer.call(COMPLETION_ENDPOINT, [SHORT], ""))
        while not preparer._small.child._at_work:
            await asyncio.sleep(0)
        with pytest.raises(ApiError, match="others' bodies"):
            await preparer.call(COMPLETION_ENDPOINT, [SHORT], "")
        os.kill(process.pid, signal.SIGCONT)
        assert num_given(await first) == 1
        assert process is preparer._small.child._process

    preparing(scenario)


def test_a_process_that_hangs_is_killed_and_its_body_begun_again() -> None:
    async def scenario(preparer: Preparer) -> None:
        child = preparer._small.child
        process = child._process
        assert process
        child._patience_s = 0.05
        os.kill(process.pid, signal.SIGSTOP)
        asking = asyncio.create_task(preparer.call(COMPLETION_ENDPOINT, [SHORT], ""))
        assert await process.wait() == -signal.SIGKILL
        child._patience_s = 60
        assert num_given(await asking) == 1
        assert num_given(await preparer.call(COMPLETION_ENDPOINT, [SHORT], "")) == 1

    preparing(scenario)


# Half of a surrogate pair in names, which no prompt has.
PROPERTIES = {"type": "object", "properties": {"\ud800": {"type": "integer"}}}
HALVES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/messages", {"max_tokens": 5, "tools": [{"name": "x", "type": "\ud800"}]}),
    ("/v1/messages", {"max_tokens": 5, "tools": [{"name": "\ud800"}]}),
    ("/v1/messages", {"max_tokens": 5, "tools": [{"name": "x", "input_schema": PROPERTIES}]}),
    ("/v1/messages/count_tokens", {"tools": [{"name": "x", "type": "\udfff"}]}),
    (CHAT, {"tools": [{"type": "function", "function": {"name": "x", "parameters": PROPERTIES}}]}),
]


def test_half_of_a_surrogate_pair_is_refused_wherever_it_is() -> None:
    async def scenario(preparer: Preparer) -> None:
        for path, more in HALVES:
            body = json.dumps({"messages": QUESTION} | more).encode()
            ask = preparer.answer if path.endswith("count_tokens") else preparer.call
            with pytest.raises(ApiError, match="half of a surrogate pair") as raised:
                await ask(ENDPOINTS[path], [body], "")
            assert raised.value.status == 400
            in_place = PreparerInPlace(preparer.model, Limits(), MODULE)
            with pytest.raises(ApiError, match="half of a surrogate pair"):
                await in_place.result(ENDPOINTS[path], [body], "")

    preparing(scenario, with_template("{% if tools %}<function={% endif %}{{ messages[0].content }}"))
