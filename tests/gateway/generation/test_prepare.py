"""Bodies are read by processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from tokenizers import Regex
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import Replace
from tokenizers.models import WordLevel

from alignedserve.gateway.anthropic.batch_bodies import MESSAGE_BATCHES, PreparedBatch
from alignedserve.gateway.endpoints import ENDPOINTS, MODULE
from alignedserve.gateway.generation import preparer as preparer_module
from alignedserve.gateway.generation.call import Call, packed
from alignedserve.gateway.generation.endpoint import Endpoint, Result
from alignedserve.gateway.generation.prepare_process import NICENESS, PrepareReply
from alignedserve.gateway.generation.prepare_process import __name__ as PROCESS
from alignedserve.gateway.generation.preparer import SMALL_BYTES, PrepareLane, Preparer
from alignedserve.gateway.generation.responding import LineAnswers, RequestBuilder
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.limits import fair_queue
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.completions import CHAT as CHAT_ENDPOINT
from alignedserve.gateway.openai.completions import COMPLETIONS as COMPLETION_ENDPOINT
from alignedserve.gateway.openai.completions import CompletionSpec
from alignedserve.gateway.process import GatewayProcess
from alignedserve.protocol.rate_limited_log import RateLimitedLog
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
    return ENDPOINTS[path].prepare(data, MODEL, CallLimits())


def told(call: Callable[[], Result]) -> object:
    try:
        return call()
    except ApiError as error:
        return error.status, error.body


@pytest.mark.slow
def test_the_process_says_what_is_made_of_a_body() -> None:
    async def scenario() -> None:
        preparer = Preparer(MODEL, CallLimits(), MODULE)
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


def test_a_batch_of_megabytes_is_not_copied_where_the_answer_of_the_process_is_read() -> None:
    """Copying it held up all streams: it is decoded on the event loop."""
    file = b"x" * (16 << 20)
    made = msgspec.msgpack.encode(PreparedBatch(memoryview(file), num_lines=1, model="demo"))
    answer = msgspec.msgpack.encode(PrepareReply(made=memoryview(made)))
    found = preparer_module._result_of(answer, MESSAGE_BATCHES)
    assert isinstance(found, PreparedBatch) and found.body == file
    assert found.body.obj is answer


def test_what_is_wrong_is_named() -> None:
    for endpoint, body, param in WRONG:
        with pytest.raises(ApiError) as raised:
            prepare(endpoint, json.dumps(body).encode())
        assert raised.value.status in (400, 404) and raised.value.param == param


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/detokenize", {"tokens": [0]}, "tokens"),
        (COMPLETIONS, {"prompt": [0], "echo": True}, "prompt"),
        (CHAT, {"messages": QUESTION}, "messages"),
    ],
)
def test_a_decoder_that_panics_is_an_error_of_the_call(path: str, body: dict[str, Any], param: str) -> None:
    long = "x" * 200
    backend = Backend(WordLevel({long: 0, "<s>": 1}, unk_token="<s>"))
    # Its number of retries for this word is above the limit.
    backend.decoder = Replace(Regex("(x+x+)+y"), "")
    files = TokenizerFiles(backend, {}, {"default": long})
    model = replace(MODEL, tokenizer=Tokenizer(files))
    with pytest.raises(ApiError, match="the model's tokenizer failed") as raised:
        ENDPOINTS[path].prepare(json.dumps(body).encode(), model, CallLimits())
    assert raised.value.status == 400 and raised.value.param == param


def test_prompts_are_what_was_sent() -> None:
    found = prepare(COMPLETIONS, b'{"prompt": ["How far?", "x"]}')
    assert isinstance(found, Call)
    assert found.prompts == [packed(TOKENIZER.encode("How far?")), packed(TOKENIZER.encode("x"))]


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
        preparer = Preparer(model, CallLimits(), MODULE)
        try:
            await preparer.start()
            await scenario(preparer)
        finally:
            await preparer.aclose()

    play(with_one)


SHORT = json.dumps({"prompt": "x"}).encode()
LONG = json.dumps({"prompt": "x", "user": "y" * SMALL_BYTES}).encode()


def num_given(call: object) -> int:
    assert isinstance(call, Call) and isinstance(call.spec, CompletionSpec)
    return call.spec.num_given


def test_a_body_that_takes_too_long_ends_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(preparer: Preparer) -> None:
        monkeypatch.setattr(preparer_module, "TIMEOUT_S", 1e-6)
        with pytest.raises(ApiError, match="takes longer than"):
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


def process_of(lane: PrepareLane) -> asyncio.subprocess.Process:
    assert lane.child._process
    return lane.child._process


async def spare_of(preparer: Preparer) -> asyncio.subprocess.Process:
    """Returns the spare process, when it is ready."""
    spare = preparer._small.child._starter._spare
    assert spare
    return await asyncio.shield(spare)


def niceness_of(process: asyncio.subprocess.Process) -> int:
    return os.getpriority(os.PRIO_PROCESS, process.pid) - os.nice(0)


def test_a_small_body_that_takes_long_leaves_its_lane_to_a_process_that_is_ready() -> None:
    async def scenario(preparer: Preparer) -> None:
        spare, first = await spare_of(preparer), process_of(preparer._small)
        hanging = asyncio.create_task(preparer.call(CHAT_ENDPOINT, chat("hang"), ""))
        assert await first.wait() == -signal.SIGPROF
        await preparer.call(CHAT_ENDPOINT, chat("go on"), "")
        assert process_of(preparer._small) is spare and niceness_of(spare) == 0
        assert not hanging.done()
        hanging.cancel()

    preparing(scenario, with_template(LOOPS_IF_TOLD))


def test_the_first_body_that_is_not_small_finds_a_process_that_is_ready() -> None:
    async def scenario(preparer: Preparer) -> None:
        spare = await spare_of(preparer)
        await preparer.call(COMPLETION_ENDPOINT, [LONG], "")
        assert process_of(preparer._medium) is spare and niceness_of(spare) == NICENESS
        await preparer.call(COMPLETION_ENDPOINT, [LONG], "")
        assert niceness_of(spare) == NICENESS

    preparing(scenario)


def test_a_template_that_hangs_with_any_chat_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer_module, "START_S", 0.2)

    async def scenario() -> None:
        async with contextlib.aclosing(Preparer(with_template(LOOPS), CallLimits(), MODULE)) as preparer:
            with pytest.raises(
                ValueError, match="chat template takes more than 0.2 s for chats of a few words"
            ):
                await preparer.start()
            # One that is started later fails its calls.
            with pytest.raises(ApiError, match="no process can read bodies") as raised:
                await preparer.call(CHAT_ENDPOINT, chat("x"), "")
            assert raised.value.status == 503

    play(scenario)


def test_a_machine_without_a_process_to_spare_is_not_the_models_fault(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        async with contextlib.aclosing(Preparer(MODEL, CallLimits(), MODULE)) as preparer:
            with monkeypatch.context() as patch:
                patch.setattr("alignedserve.process.child.sys.executable", "/nothing/here")
                with pytest.raises(FileNotFoundError, match="/nothing/here"):
                    await preparer.start()
                for _ in range(3):
                    with pytest.raises(ApiError, match="no process can read bodies"):
                        await preparer.call(COMPLETION_ENDPOINT, [SHORT], "")
            await preparer.start()

    monkeypatch.setattr(preparer_module, "_log", RateLimitedLog(preparer_module._log._logger))
    play(scenario)
    # Every call could write such a line.
    (line,) = [record for record in caplog.records if "can't be prepared" in record.message]
    assert "/nothing/here" in line.message


def test_a_machine_that_is_too_busy_is_not_the_models_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preparer_module, "START_CLOCK_S", 0.1)

    async def scenario() -> None:
        async with contextlib.aclosing(Preparer(with_template(LOOPS), CallLimits(), MODULE)) as preparer:
            with pytest.raises(TimeoutError, match=r"not ready after 0.1 s: the machine is too busy"):
                await preparer.start()

    play(scenario)


def test_the_memory_of_the_process_that_started_it_is_not_its_own() -> None:
    program = f"import {PROCESS} as process; print(process.most_bytes())"
    # What this process has had counts in what getrusage says of those that it starts.
    held = b"x" * (256 << 20)
    most = int(subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True).stdout)
    assert 0 < most < len(held)


LARGE = "{{ 'x' * 9999999999 }}"
LARGE_IF_TOLD = f"{{% if messages[0].content == 'much' %}}{LARGE}{{% endif %}}{{{{ messages[0].content }}}}"


def test_a_template_that_takes_too_much_memory_costs_its_own_chats_only() -> None:
    async def scenario(preparer: Preparer) -> None:
        with pytest.raises(ApiError, match="takes too much memory to read"):
            await preparer.call(CHAT_ENDPOINT, chat("much"), "")
        assert isinstance(await preparer.call(CHAT_ENDPOINT, chat("x"), ""), Call)

    preparing(scenario, with_template(LARGE_IF_TOLD))


def test_a_template_that_takes_too_much_memory_for_any_chat_is_refused() -> None:
    async def scenario() -> None:
        async with contextlib.aclosing(Preparer(with_template(LARGE), CallLimits(), MODULE)) as preparer:
            with pytest.raises(ValueError, match="takes more than 4 GiB of memory for chats of a few words"):
                await preparer.start()

    play(scenario)


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


def test_whoever_hangs_up_pays_for_the_time_that_its_body_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "FORGOTTEN_S", 0.0)

    async def scenario(preparer: Preparer) -> None:
        process, order = process_of(preparer._small), list[str]()
        os.kill(process.pid, signal.SIGSTOP)
        gone = asyncio.create_task(preparer.call(COMPLETION_ENDPOINT, [SHORT], "a"))
        while not preparer._small.child._at_work:
            await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait({gone})

        async def ask(owner: str) -> None:
            await preparer.call(COMPLETION_ENDPOINT, [SHORT], owner)
            order.append(owner)

        asking = [asyncio.create_task(ask(owner)) for owner in ("a", "b")]
        # Both wait for their turn now.
        await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.gather(*asking)
        assert order == ["b", "a"]

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
        with pytest.raises(ApiError, match="bodies of other API keys"):
            await preparer.call(COMPLETION_ENDPOINT, [SHORT], "")
        os.kill(process.pid, signal.SIGCONT)
        assert num_given(await first) == 1
        assert process is preparer._small.child._process

    preparing(scenario)


def test_chats_go_before_lines_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fair_queue, "BE_SHARE", 0.0)

    async def scenario(preparer: Preparer) -> None:
        process, order = process_of(preparer._small), list[str]()
        lines = LineAnswers(cast(RequestBuilder, SimpleNamespace(preparer=preparer)), ENDPOINTS)

        def begin(name: str, work: Coroutine[Any, Any, object]) -> asyncio.Task[object]:
            task = asyncio.create_task(work)
            task.add_done_callback(lambda _: order.append(name))
            return task

        os.kill(process.pid, signal.SIGSTOP)
        begun = [begin("first", preparer.call(COMPLETION_ENDPOINT, [SHORT], ""))]
        while not preparer._small.child._at_work:
            await asyncio.sleep(0)
        # It is refused when it has been prepared, as it asks for a stream.
        streamed = json.dumps({"prompt": "x", "stream": True}).encode()
        begun += [begin("line", lines.ask(COMPLETIONS, streamed, time.time() + 60, "")) for _ in range(3)]
        begun += [begin("chat", preparer.call(CHAT_ENDPOINT, chat("x"), "")) for _ in range(3)]
        while sum(map(len, preparer._small._turns._waiting.values())) < 6:
            await asyncio.sleep(0)
        os.kill(process.pid, signal.SIGCONT)
        await asyncio.gather(*begun)
        assert order == ["first"] + ["chat"] * 3 + ["line"] * 3

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
            in_place = PreparerInPlace(preparer.model, CallLimits(), MODULE)
            with pytest.raises(ApiError, match="half of a surrogate pair"):
                await in_place.result(ENDPOINTS[path], [body], "")

    preparing(scenario, with_template("{% if tools %}<function={% endif %}{{ messages[0].content }}"))
