"""/v1/responses with OpenAI's own client: whole, streamed, kept, in the background; on a real Redis."""

from __future__ import annotations

import asyncio
import json
import logging
from dataclasses import replace
from typing import Any, cast

import httpx2
import openai
import pytest
from openai.types.responses import Response

from alignedserve.gateway import process
from alignedserve.gateway.generation.preparer import SMALL_BYTES, ReceivedBody
from alignedserve.gateway.http import access
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.reading import BodyMemory
from alignedserve.gateway.openai.responses.kept import KeptResponses
from alignedserve.gateway.openai.responses.references import MAX_TURNS, stored_items
from alignedserve.gateway.openai.responses.routes import MAX_LOOKED_AT_BYTES
from alignedserve.process.child import Child
from alignedserve.store import ResponseHead, StoreAway
from alignedserve.store.redis_connection import RedisConnection
from alignedserve.store.redis_parts import PIECE_BYTES
from alignedserve.store.redis_responses import RedisResponses
from alignedserve.store.redis_store import RedisStore
from alignedserve.store.scripts import PREFIX
from alignedserve.vopr.front_end.preparer_in_place import PreparerInPlace
from tests.gateway.batching import System, gateway_on, play
from tests.gateway.scripted import MODEL, TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import JSON, served
from tests.gateway.served import play as play_alone
from tests.gateway.tools.test_reasoning import DEEPSEEK
from tests.gateway.tools.test_tools import CALL, TEMPLATE, follows, model_with
from tests.store.redis_process import redis_running

FUNCTION = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}


async def streamed(stream: Any) -> list[Any]:
    return [event async for event in stream]


def test_a_response_has_text_usage_and_what_was_asked() -> None:
    async def scenario() -> None:
        async with served() as at:
            done = await at.client.responses.create(
                model="demo",
                input="How far?",
                instructions="Be brief.",
                max_output_tokens=100,
                temperature=0.5,
            )
            assert (
                done.output_text == "one two three"
                and done.status == "completed"
                and done.object == "response"
            )
            assert (
                done.instructions == "Be brief." and done.temperature == 0.5 and done.max_output_tokens == 100
            )
            request = at.router.submitted[0].request
            messages = [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": "How far?"},
            ]
            assert request.prompt == TOKENIZER.chat_ids(messages) and request.tier == "rt"
            assert done.usage and done.usage.input_tokens == len(request.prompt)
            assert (
                done.usage.output_tokens
                == len(answer_of("one two three"))
                == done.usage.total_tokens - len(request.prompt)
            )
            # there is no store
            assert not done.model_dump()["store"]
            short = await at.client.responses.create(model="demo", input="How far?", max_output_tokens=2)
            assert short.status == "incomplete" and short.incomplete_details
            assert short.incomplete_details.reason == "max_output_tokens"
            flex = await at.client.responses.create(model="demo", input="How far?", service_tier="flex")
            assert flex.service_tier == "flex" and at.router.submitted[2].request.tier == "be"

    play_alone(scenario)


def test_a_stream_has_the_whole_sequence_of_events() -> None:
    async def scenario() -> None:
        async with served() as at:
            events = await streamed(
                await at.client.responses.create(model="demo", input="How far?", stream=True)
            )
            names = [event.type for event in events]
            deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
            assert names == [
                "response.created",
                "response.in_progress",
                "response.output_item.added",
                "response.content_part.added",
                *["response.output_text.delta"] * len(deltas),
                "response.output_text.done",
                "response.content_part.done",
                "response.output_item.done",
                "response.completed",
            ]
            assert [event.sequence_number for event in events] == list(range(len(events)))
            assert "".join(deltas) == "one two three" == events[-1].response.output_text
            ids = {event.item_id for event in events if hasattr(event, "item_id")}
            assert ids == {events[-1].response.output[0].id}
            assert events[0].response.id == events[-1].response.id

    play_alone(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
def test_thoughts_text_and_calls_are_items(is_stream: bool) -> None:
    async def scenario() -> None:
        said = f"Hm.\n</think>\n\nOne moment.{CALL}"
        async with served(ScriptedRouter(answer=answer_of(said)), model=model_with(DEEPSEEK)) as at:
            create: Any = at.client.responses.create
            found = await create(model="demo", input="Where?", tools=[FUNCTION], stream=is_stream)
            if is_stream:
                events = await streamed(found)
                found = events[-1].response
                arguments = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
                assert "".join(arguments) == '{"city": "Rome"}'
                thoughts = [e.delta for e in events if e.type == "response.reasoning_text.delta"]
                assert "".join(thoughts) == "Hm."
            reasoning, message, call = found.output
            assert reasoning.content[0].text == "Hm." and found.output_text == "One moment."
            assert (call.type, call.name, call.arguments) == ("function_call", "weather", '{"city": "Rome"}')
            assert message.type == "message" and found.usage.output_tokens_details.reasoning_tokens > 0
            # the next turn has all of it
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
            items = [{"role": "user", "content": "Where?"}, *found.model_dump()["output"], output]
            await create(model="demo", input=items, tools=[FUNCTION])
            prompt = TOKENIZER.decode(at.router.submitted[1].request.prompt)
            assert "One moment.Rome" in prompt and "tool: mild" in prompt

    play_alone(scenario)


def test_a_format_and_a_chosen_function_are_structured_outputs() -> None:
    async def scenario() -> None:
        async with served(model=model_with(TEMPLATE)) as at:
            schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
            form: Any = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
            done = await at.client.responses.create(model="demo", input="x", text=form)
            follows(at.router.submitted[0].request.params.structured_outputs, '{"a": 5}')
            assert done.model_dump(by_alias=True)["text"]["format"]["schema"] == schema
            chosen: Any = {"type": "function", "name": "weather"}
            tools: Any = [FUNCTION, {"type": "web_search"}]
            raw = await at.client.responses.with_raw_response.create(
                model="demo", input="x", tools=tools, tool_choice=chosen
            )
            assert raw.headers["x-ignored-parameters"] == "tools.web_search"
            follows(at.router.submitted[1].request.params.structured_outputs, '{"city": "Rome"}')
            assert raw.parse().output[0].type == "function_call"

    play_alone(scenario)


def test_the_model_is_told_of_the_functions_that_are_allowed() -> None:
    async def scenario() -> None:
        async with served(model=model_with(TEMPLATE)) as at:
            clock = {"type": "function", "name": "clock"}
            chosen: Any
            body = {"input": "x", "tools": [FUNCTION, clock, {"type": "web_search"}]}
            for mode in ("auto", "required"):
                chosen = {"type": "allowed_tools", "mode": mode, "tools": [clock, {"type": "web_search"}]}
                response = await at.post("/v1/responses", body | {"tool_choice": chosen})
                assert response.status_code == 200, response.text
                prompt = TOKENIZER.decode(at.router.submitted[-1].request.prompt)
                assert '"clock"' in prompt and '"weather"' not in prompt
            wanted = at.router.submitted[-1].request.params.structured_outputs
            follows(wanted, '[{"name": "clock", "parameters": {}}]')
            with pytest.raises(AssertionError):
                follows(wanted, '[{"name": "weather", "parameters": {}}]')
            for tools in ([{"type": "function", "name": "other"}], None):
                chosen = {"type": "allowed_tools", "mode": "auto", "tools": tools}
                response = await at.post("/v1/responses", body | {"tool_choice": chosen})
                assert response.status_code == 400 and "tool_choice" in response.text

    play_alone(scenario)


def test_logprobs_come_with_the_text() -> None:
    async def scenario() -> None:
        async with served() as at:
            done = await at.client.responses.create(
                model="demo", input="x", include=["message.output_text.logprobs"], top_logprobs=2
            )
            assert at.router.submitted[0].request.params.logprobs == 2
            (item,) = done.output
            assert item.type == "message" and item.content[0].type == "output_text"
            assert item.content[0].logprobs is not None

    play_alone(scenario)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "conversation": 5}, "conversation"),
        ({"input": "x", "conversation": "conv_1", "previous_response_id": "resp_1"}, "conversation"),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "tools": [{"type": "function", "name": "a b"}]}, "tools"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "background": True, "store": False}, "background"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "previous_response_id": "\ud800"}, "previous_response_id"),
        # a process prepares it
        ({"input": "x" * SMALL_BYTES, "previous_response_id": "\ud800"}, "previous_response_id"),
        ({"input": "x", "previous_response_id": "r" * 1_000_000}, "previous_response_id"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text"),
        ({}, "input"),
    ],
)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str) -> None:
    async def scenario() -> None:
        async with served(model=model_with(TEMPLATE)) as at:
            # httpx2 sends no halves of surrogate pairs
            response = await at.http.post("/v1/responses", content=json.dumps(body), headers=JSON)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text

    play_alone(scenario)


# ---- kept ----


def test_a_conversation_goes_on_from_a_kept_response() -> None:
    async def scenario(at: System) -> None:
        create = at.client.responses.create
        first = await create(model="demo", input="How far?", instructions="Be brief.")
        second = await create(model="demo", input="And back?", previous_response_id=first.id)
        third = await create(
            model="demo", input="Sure?", previous_response_id=second.id, instructions="Be kind.", stream=True
        )
        last = (await streamed(third))[-1].response
        turns = [
            {"role": "user", "content": "How far?"},
            {"role": "assistant", "content": "one two three"},
            {"role": "user", "content": "And back?"},
            {"role": "assistant", "content": "one two three"},
            {"role": "user", "content": "Sure?"},
        ]
        prompts = [submit.request.prompt for submit in at.router.submitted]
        assert prompts[1] == TOKENIZER.chat_ids(turns[:3])
        assert prompts[2] == TOKENIZER.chat_ids([{"role": "system", "content": "Be kind."}, *turns])
        assert await at.client.responses.retrieve(last.id) == last
        items = await at.client.responses.input_items.list(second.id, order="asc")
        # a text or parts, as it was sent
        (content,) = [cast(Any, item).content for item in items.data]
        assert (content if isinstance(content, str) else content[0].text) == "And back?"
        await at.client.responses.delete(second.id)
        with pytest.raises(openai.NotFoundError):
            await at.client.responses.retrieve(second.id)
        with pytest.raises(openai.BadRequestError) as error:
            await create(model="demo", input="x", previous_response_id=last.id)
        assert error.value.code == "previous_response_not_found"
        # what is not to be kept is not
        other = await create(model="demo", input="x", store=False)
        with pytest.raises(openai.NotFoundError):
            await at.client.responses.retrieve(other.id)

    play(scenario)


def test_a_kept_response_can_be_streamed_again_from_any_event() -> None:
    async def scenario(at: System) -> None:
        done = await at.client.responses.create(model="demo", input="How far?")
        events = await streamed(await at.client.responses.retrieve(done.id, stream=True))
        assert [event.sequence_number for event in events] == list(range(len(events)))
        assert events[-1].response == done
        rest = await streamed(await at.client.responses.retrieve(done.id, stream=True, starting_after=3))
        assert rest == events[4:]
        sent = await streamed(await at.client.responses.create(model="demo", input="How far?", stream=True))
        again = await streamed(await at.client.responses.retrieve(sent[-1].response.id, stream=True))
        assert list(dict.fromkeys(each.type for each in again)) == list(
            dict.fromkeys(each.type for each in sent)
        )
        assert again[-1].response == sent[-1].response

    play(scenario)


def test_a_response_before_is_found_however_its_name_is_written() -> None:
    async def scenario(at: System) -> None:
        text = '{"input": "x", "earlier_items": [], "previous\\u005fresponse_id": "resp_of_another"}'
        headers = {"content-type": "application/json"}
        response = await at.gateway.http.post("/v1/responses", content=text, headers=headers)
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "previous_response_not_found"

    play(scenario)


@pytest.mark.slow
def test_references_and_conversations_count_as_the_body_does(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    ask = Child.ask

    async def asking(child: Child, *pieces: Any) -> bytes:
        asked.append(sum(map(len, pieces)))
        return await ask(child, *pieces)

    async def scenario(at: System) -> None:
        monkeypatch.setattr(Child, "ask", asking)
        large = {"type": "reasoning", "id": "a", "junk": "x" * 1_000_000}
        user = {"role": "user", "content": "How far?"}
        references = [{"type": "item_reference", "id": "a"}] * 20
        post = at.gateway.http.post
        refused = await post("/v1/responses", json={"input": [large, *references, user]})
        # it is read once
        assert refused.status_code == 413 and len(asked) == 1, refused.text
        # Within 8 KiB too, which is not read here but where calls of its whole size are.
        small = {**large, "junk": "x" * 4000}
        for count, is_asked in ((1, False), (60, True)):
            asked.clear()
            many = [{"type": "item_reference", "id": "a"}] * count
            first = await post("/v1/responses", json={"input": [small, *many, user]})
            assert first.status_code == 200, first.text
            assert [size < 8 << 10 for size in asked] == [True] * is_asked
        items = await post("/v1/responses", json={"input": [{**large, "junk": "x" * 5_000_000}, user]})
        again = {
            "input": [{**large, "junk": "x" * 4_000_000}, user],
            "previous_response_id": items.json()["id"],
        }
        refused = await post("/v1/responses", json=again)
        assert refused.status_code == 413 and "conversation" in refused.text

    play(scenario)


def test_an_answer_whose_rest_is_gone_ends_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    piece, is_away = RedisConnection.piece, False

    async def then_gone(redis: RedisConnection, key: str, begin: int, end: int) -> bytes:
        found = await piece(redis, key, begin, end)
        if begin:
            # It had the first piece.
            await redis.unlink([key])
            if is_away:
                raise StoreAway("it has just gone")
        return found

    async def scenario(at: System) -> None:
        nonlocal is_away
        http, junk = at.gateway.http, "x" * 3 * PIECE_BYTES
        body = {
            "input": [{"role": "user", "content": "x", "junk": junk}],
            "tools": [{"type": "other", "junk": junk}],
        }
        names = [(await http.post("/v1/responses", json=body)).json()["id"] for _ in range(4)]
        monkeypatch.setattr(RedisConnection, "piece", then_gone)
        for number, name in enumerate(names):
            is_away = number > 1
            with pytest.raises(httpx2.RemoteProtocolError):
                await http.get(f"/v1/responses/{name}{'/input_items' * (number % 2)}")
        logged = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
        assert [each.partition(":")[0] for each in logged if "store" not in each] == ["broken off"] * 4

    play(scenario)


@pytest.mark.slow
def test_what_is_kept_counts_as_it_is_written() -> None:
    """A number of four letters may be written as twenty."""

    async def scenario(at: System) -> None:
        numbers = ",".join(["1e15"] * 1_000_000)
        for given in (
            f'{{"input": [{{"role": "user", "content": "x", "junk": [{numbers}]}}]}}',
            f'{{"input": "x", "tools": [{{"type": "other", "junk": [{numbers}]}}]}}',
        ):
            response = await at.gateway.http.post("/v1/responses", content=given, headers=JSON)
            assert response.status_code == 413, response.text[:1000]
            assert "as it would be stored" in response.text, response.text[:1000]

    play(scenario)


def test_a_conversation_goes_on_without_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(at: System) -> None:
        create: Any = at.client.responses.create
        include = ["message.output_text.logprobs"]
        first = await create(model="demo", input="How far?", include=include, top_logprobs=20)
        assert first.output[0].content[0].logprobs
        heads: list[ResponseHead] = []
        heads_up_to = KeptResponses._heads_up_to

        async def noting(*args: Any) -> Any:
            heads.extend(found := await heads_up_to(*args))
            return found

        monkeypatch.setattr(KeptResponses, "_heads_up_to", noting)
        await create(model="demo", input="And back?", previous_response_id=first.id)
        turns = [
            {"role": "user", "content": "How far?"},
            {"role": "assistant", "content": "one two three"},
            {"role": "user", "content": "And back?"},
        ]
        assert at.router.submitted[1].request.prompt == TOKENIZER.chat_ids(turns)
        (head,) = heads
        assert head.num_conversation_bytes < 500 < head.num_logprob_bytes

    play(scenario)


@pytest.mark.slow
def test_items_are_listed_in_order_however_large_they_are() -> None:
    async def scenario(at: System) -> None:
        for size in (10, 50_000, 500_000):
            given: Any = [
                {"id": f"msg_{number}", "role": "user", "content": [{"type": "input_text", "text": "x"}]}
                | {"junk": str(number) * size}
                for number in range(3)
            ]
            done = await at.client.responses.create(model="demo", input=given)
            for order in ("asc", "desc"):
                path = f"/v1/responses/{done.id}/input_items?order={order}"
                found = (await at.gateway.http.get(path)).json()
                expected = given if order == "asc" else given[::-1]
                assert [item["junk"] for item in found["data"]] == [item["junk"] for item in expected]
                ends = (expected[0]["id"], expected[-1]["id"], False)
                assert (found["first_id"], found["last_id"], found["has_more"]) == ends
        none = await at.client.responses.create(model="demo", input=[], instructions="Be brief.")
        assert (await at.client.responses.input_items.list(none.id)).data == []

    play(scenario)


def test_items_of_a_response_that_is_deleted_meanwhile_are_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find = KeptResponses.find

    async def scenario(at: System) -> None:
        done = await at.client.responses.create(model="demo", input="How far?")

        async def then_deleted(kept: KeptResponses, response_id: str, owner: str) -> ResponseHead:
            head = await find(kept, response_id, owner)
            assert kept._store
            await kept._store.delete(head)
            return head

        monkeypatch.setattr(KeptResponses, "find", then_deleted)
        with pytest.raises(openai.NotFoundError):
            await at.client.responses.input_items.list(done.id)

    play(scenario)


def test_the_tokens_of_an_input_are_counted() -> None:
    async def scenario(at: System) -> None:
        create: Any = at.client.responses.create
        first = await create(model="demo", input="How far?")
        count = at.client.responses.input_tokens.count
        for asked in (
            {"input": "And back?", "instructions": "Be brief."},
            {"input": "And back?", "previous_response_id": first.id},
            {"input": "And back?", "previous_response_id": first.id, "user": "x" * SMALL_BYTES},
        ):
            answered = await create(model="demo", **asked)
            counted = await count(model="demo", extra_body=asked)
            assert counted.object == "response.input_tokens"
            assert counted.input_tokens == answered.usage.input_tokens
        with pytest.raises(openai.BadRequestError):
            await count(model="demo", input="x", previous_response_id="resp_1")

    play(scenario)


@pytest.mark.parametrize(
    ("num_more", "num_turns"), [(0, 1), (MAX_LOOKED_AT_BYTES // 2, 1), (MAX_LOOKED_AT_BYTES, 2)]
)
def test_a_call_that_goes_on_takes_one_turn_at_the_process_for_bodies(
    num_more: int, num_turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    made = PreparerInPlace.made

    async def noted(self: PreparerInPlace, body: ReceivedBody, num_added: int = 0) -> Any:
        asked.append(body.earlier is not None)
        return await made(self, body, num_added)

    monkeypatch.setattr(PreparerInPlace, "made", noted)

    async def scenario(at: System) -> None:
        create: Any = at.client.responses.create
        first = await create(model="demo", input="How far?")
        asked.clear()
        await create(model="demo", input="And back?", user="x" * num_more, previous_response_id=first.id)
        assert asked == [False, True][-num_turns:]

    play(scenario)


def test_what_is_wrong_with_a_body_comes_before_what_it_goes_on_with() -> None:
    async def scenario(at: System) -> None:
        for more, param in (({"temperature": "hot"}, "temperature"), ({}, "previous_response_id")):
            body = {"model": "demo", "input": "x", "previous_response_id": "resp_1", **more}
            response = await at.gateway.http.post("/v1/responses", json=body)
            assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        # The last of several counts.
        text = '{"input": "x", "previous_response_id": "resp_1", "previous_response_id": null}'
        assert (await at.gateway.http.post("/v1/responses", content=text, headers=JSON)).status_code == 200
        text = '{"input": "x", "previous_response_id": null, "previous\\u005fresponse_id": "resp_1"}'
        assert (await at.gateway.http.post("/v1/responses", content=text, headers=JSON)).status_code == 400
        for name in ("previous_response_id", "conversation"):
            data = b'{"input": "x", "%b": "\xff"}' % name.encode()
            refused = await at.gateway.http.post("/v1/responses", content=data, headers=JSON)
            assert refused.status_code == 400 and "JSON" in refused.json()["error"]["message"]

    play(scenario)


@pytest.mark.parametrize("num_words", [200, 40_000])
def test_tokens_of_an_input_that_does_not_fit_are_counted(num_words: int) -> None:
    """The longer one has more letters than any prompt that fits. What is said of the output makes no difference."""

    async def scenario() -> None:
        asked: dict[str, Any] = {"model": "demo", "input": "word " * num_words}
        messages = [{"role": "user", "content": asked["input"]}]
        tools = {"tools": [{"type": "web_search"}]}
        async with served(model=replace(MODEL, max_model_len=100)) as at:
            for more in ({}, {"max_output_tokens": 0}, {"top_logprobs": 1000}, {"temperature": -1}):
                counted = await at.post("/v1/responses/input_tokens", asked | more | tools)
                assert counted.json()["input_tokens"] == len(TOKENIZER.chat_ids(messages)), more
                assert counted.headers["x-ignored-parameters"] == "tools.web_search"
            refused = await at.post("/v1/responses", asked)
            assert refused.status_code == 400
            assert refused.json()["error"]["code"] == "context_length_exceeded"

    play_alone(scenario)


# ---- in the background ----


def test_a_stream_of_a_response_that_is_deleted_ends_with_an_event() -> None:
    async def scenario(at: System) -> None:
        at.router.allow(0)
        begun = await at.client.responses.create(model="demo", input="How far?", background=True)
        async with at.gateway.http.stream("GET", f"/v1/responses/{begun.id}?stream=true") as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith(": waiting")
            await at.client.responses.delete(begun.id)
            rest = [line async for line in lines]
        assert "event: error" in rest and any("not found" in line for line in rest)

    play(scenario)


@pytest.mark.slow
def test_a_stream_that_waits_says_so_while_the_store_is_away() -> None:
    async def scenario(at: System) -> None:
        at.router.allow(0)
        begun = await at.client.responses.create(model="demo", input="How far?", background=True)
        while not at.router.submitted:
            await asyncio.sleep(0.01)
        background = at.gateway.process._services._background
        assert background and isinstance(background._store, RedisResponses)
        async with at.gateway.http.stream("GET", f"/v1/responses/{begun.id}?stream=true") as stream:
            lines = stream.aiter_lines()
            await at.redis.kill()
            while not background._store._redis.is_down:
                assert await anext(lines) in (": waiting", "")
            assert [await anext(lines) for _ in range(8)].count(": waiting") == 4
            await at.redis.start()
            at.router.allow(None)
            rest = [line async for line in lines]
        assert "event: response.completed" in rest

    play(scenario)


async def until_over(at: System, response: Response) -> Response:
    while response.status in ("queued", "in_progress"):
        await asyncio.sleep(0.02)
        response = await at.client.responses.retrieve(response.id)
    return response


def test_a_response_in_the_background_is_answered_when_nobody_waits() -> None:
    async def scenario(at: System) -> None:
        begun = await at.client.responses.create(model="demo", input="How far?", background=True)
        assert begun.status == "queued" and begun.background
        done = await until_over(at, begun)
        assert (done.status, done.output_text, done.id) == ("completed", "one two three", begun.id)
        more = await at.client.responses.create(
            model="demo",
            input="And back?",
            previous_response_id=done.id,
            background=True,
            service_tier="flex",
        )
        assert (await until_over(at, more)).status == "completed"
        assert at.router.submitted[1].request.tier == "be"
        raw: Any = await at.client.responses.with_raw_response.create(
            model="demo", input="x", background=True, stream=True, extra_body={"mood": "good"}
        )
        assert raw.headers["x-ignored-parameters"] == "mood"
        events = await streamed(raw.parse())
        assert events[-1].type == "response.completed" and events[-1].response.output_text == "one two three"

    play(scenario)


def test_a_response_whose_predecessor_is_deleted_before_its_turn_says_so() -> None:
    async def scenario(at: System) -> None:
        first = await at.client.responses.create(model="demo", input="How far?")
        background = at.gateway.process._services._background
        assert background
        look, is_asked, may_look = background._poller._look, asyncio.Event(), asyncio.Event()

        async def looking() -> None:
            is_asked.set()
            await may_look.wait()
            await look()

        background._poller._look = looking
        await is_asked.wait()
        create = at.client.responses.create
        begun = await create(model="demo", input="x", previous_response_id=first.id, background=True)
        await at.client.responses.delete(first.id)
        may_look.set()
        done = await until_over(at, begun)
        assert done.status == "failed" and done.error
        assert str(done.error.code) == "previous_response_not_found" and first.id in done.error.message

    play(scenario)


def test_a_response_in_the_background_can_be_cancelled_and_deleted() -> None:
    async def scenario(at: System) -> None:
        at.router.allow(0)
        begun = await at.client.responses.create(model="demo", input="How far?", background=True)
        while not at.router.submitted:
            await asyncio.sleep(0.01)
        gone = await at.client.responses.cancel(begun.id)
        assert gone.status == "cancelled"
        assert (await at.client.responses.retrieve(begun.id)).status == "cancelled"
        while at.gateway.process._islands.num_open:
            await asyncio.sleep(0.01)
        other = await at.client.responses.create(model="demo", input="How far?", background=True)
        await at.client.responses.delete(other.id)
        with pytest.raises(openai.NotFoundError):
            await at.client.responses.retrieve(other.id)
        at.router.allow(None)
        answered = await at.client.responses.create(model="demo", input="How far?")
        with pytest.raises(openai.BadRequestError, match="in the background"):
            await at.client.responses.cancel(answered.id)

    play(scenario)


def test_a_response_in_the_background_that_there_is_no_room_for_has_failed() -> None:
    async def scenario(at: System) -> None:
        at.router.allow(0)
        begun = await at.client.responses.create(model="demo", input="How far?", background=True)
        while not at.router.submitted:
            await asyncio.sleep(0.01)
        store = RedisStore(at.redis.url)
        await store._redis.incrby("alignedserve:bytes", 1 << 40)
        await store.close()
        at.router.allow(None)
        done = await until_over(at, begun)
        assert (done.status, done.output) == ("failed", []) and done.error
        assert str(done.error.code) == "storage_full" and "delete some" in done.error.message

    play(scenario)


def test_another_gateway_answers_what_one_has_begun() -> None:
    """The first one hangs: its lease lapses, and what it has to say when it wakes up does not count."""

    async def scenario(at: System) -> None:
        at.router.allow(0)
        begun = await at.client.responses.create(model="demo", input="How far?", background=True)
        while not at.router.submitted:
            await asyncio.sleep(0.01)
        background = at.gateway.process._services._background
        assert background

        async def look() -> None:
            raise StoreAway("it hangs")

        background._poller._look = look
        async with gateway_on(at.router_port, at.redis.url, name="gateway-1") as other:
            while len(at.router.submitted) < 2:
                await asyncio.sleep(0.01)
            at.router.allow(None)
            response = begun
            while response.status in ("queued", "in_progress"):
                await asyncio.sleep(0.02)
                response = await other.client.responses.retrieve(begun.id)
            assert response.output_text == "one two three"

    play(scenario)


def test_a_line_of_a_batch_job_can_be_a_response() -> None:
    async def scenario(at: System) -> None:
        url = "/v1/responses"
        bodies: list[dict[str, Any]] = [
            {"model": "demo", "input": "How far?"},
            {"model": "demo", "input": "And back?", "previous_response_id": "resp_1"},
            {"model": "demo", "input": "And back?", "conversation": "conv_1"},
            {"model": "demo", "input": "How far?", "stream": True},
        ]
        lines = [
            {"custom_id": str(number), "method": "POST", "url": url, "body": body}
            for number, body in enumerate(bodies)
        ]
        batch = await at.gateway.until(await at.gateway.submit(lines, url=url), "completed")
        (answer,) = await at.gateway.lines_of(batch.output_file_id)
        body = answer["response"]["body"]
        assert body["object"] == "response" and body["output"][0]["content"][0]["text"] == "one two three"
        assert batch.usage and batch.usage.output_tokens == body["usage"]["output_tokens"]
        errors = await at.gateway.lines_of(batch.error_file_id)
        params = [each["response"]["body"]["error"]["param"] for each in errors]
        assert params == ["previous_response_id", "conversation", "stream"]

    play(scenario)


# ---- references to stored items --------------------------------------------------------------------------------------


def referring(*items: Any) -> list[Any]:
    """An input of references, for items that are ids, and of the other items themselves."""
    return [{"type": "item_reference", "id": each} if isinstance(each, str) else each for each in items]


def test_the_second_turn_of_a_chat_may_be_references_alone() -> None:
    """As Vercel's AI SDK sends it: the items of earlier answers by their ids, and no previous_response_id."""

    async def scenario() -> None:
        said = f"Hm.\n</think>\n\nOne moment.{CALL}"
        router = ScriptedRouter(answer=answer_of(said))
        async with redis_running() as redis, served(router, model_with(DEEPSEEK), store_url=redis.url) as at:
            create: Any = at.client.responses.create
            user = {"role": "user", "content": "Where?"}
            first = await create(model="demo", input=[user], tools=[FUNCTION])
            reasoning, text, call = first.output
            output = {"type": "function_call_output", "call_id": call.call_id, "output": "mild"}
            whole = [user, *first.model_dump(exclude_none=True)["output"], output]
            await create(model="demo", input=whole, tools=[FUNCTION])
            expected = router.submitted[-1].request.prompt
            for items in (
                [user, reasoning.id, text.id, call.id, output],
                # References and items alternate, in their order.
                [user, reasoning.id, whole[2], call.id, output],
                [user, whole[1], text.id, whole[3], output],
            ):
                second = await create(model="demo", input=referring(*items), tools=[FUNCTION])
                assert router.submitted[-1].request.prompt == expected
            # A chat goes on after a turn that has references.
            await create(model="demo", input="x", previous_response_id=second.id, tools=[FUNCTION])
            after = [
                *whole,
                *second.model_dump(exclude_none=True)["output"],
                {"role": "user", "content": "x"},
            ]
            given = router.submitted[-1].request.prompt
            await create(model="demo", input=after, tools=[FUNCTION])
            assert router.submitted[-1].request.prompt == given
            counted = await at.client.responses.input_tokens.count(
                model="demo",
                input=referring(user, reasoning.id, text.id, call.id, output),
                tools=cast(Any, [FUNCTION]),
            )
            assert counted.input_tokens == len(expected)
            # A reference says what was said: its order is that of the input.
            await create(model="demo", input=referring(user, text.id, user, text.id, user))
            prompt = TOKENIZER.decode(router.submitted[-1].request.prompt)
            assert prompt.count("One moment.") == 2

    play_alone(scenario)


def test_inputs_and_items_of_conversations_can_be_referred_to_alone() -> None:
    async def scenario(at: System) -> None:
        create: Any = at.client.responses.create
        first = await create(
            model="demo", input=[{"role": "user", "content": text} for text in ("Hello.", "You.")]
        )
        asked = [each.id async for each in at.client.responses.input_items.list(first.id, order="asc")]
        made = await at.client.conversations.create(items=[{"role": "user", "content": "Ho."}])
        added = await at.client.conversations.items.create(
            made.id, items=[{"role": "user", "content": "Hi."}]
        )
        turn = await create(model="demo", input="Now?", conversation=made.id)
        kept = [each.id async for each in at.client.conversations.items.list(made.id, order="asc")]
        assert len(kept) == 4 and kept[1] == added.data[0].id and kept[3] == turn.output[0].id
        names = [*asked, first.output[0].id, *kept]
        assert max(map(len, names)) <= 64
        await create(model="demo", input=referring(*names))
        texts = ["Hello.", "You.", "one two three", "Ho.", "Hi.", "Now?", "one two three"]
        messages = [
            {"role": "assistant" if text == "one two three" else "user", "content": text} for text in texts
        ]
        assert at.router.submitted[-1].request.prompt == TOKENIZER.chat_ids(messages)
        # In a conversation, other items are referred to as its own are.
        other = await at.client.conversations.create()
        await create(model="demo", input=referring(names[0]), conversation=other.id)
        await create(model="demo", input="x", conversation=other.id)
        last = [messages[0], messages[2], {"role": "user", "content": "x"}]
        assert at.router.submitted[-1].request.prompt == TOKENIZER.chat_ids(last)
        # In the background, a reference is read again when the response begins.
        begun = await create(model="demo", input=referring(asked[0]), background=True)
        done = await until_over(at, begun)
        assert done.status == "completed"
        assert at.router.submitted[-1].request.prompt == TOKENIZER.chat_ids(messages[:1])
        # Its items are referred to by the id that it was given.
        await create(model="demo", input=referring(asked[0], done.output[0].id))
        assert at.router.submitted[-1].request.prompt == TOKENIZER.chat_ids([messages[0], messages[2]])

    play(scenario)


def test_a_reference_leads_to_ones_own_items_while_they_are_stored() -> None:
    async def scenario(at: System) -> None:
        create: Any = at.client.responses.create
        first = await create(model="demo", input="Hello.", include=["message.output_text.logprobs"])
        (name,) = [item.id for item in first.output]
        await create(model="demo", input=referring(name))
        num_submitted = len(at.router.submitted)
        unstored = await create(model="demo", input="Hello.", store=False)
        wrong = [
            name[:-1] + "f",
            f"msg_{'0' * 52}",
            "rs" + name.removeprefix("msg"),
            unstored.output[0].id,
            name + "0" * 20,
            "msg_\ud800",
        ]
        for each in wrong:
            body = json.dumps({"model": "demo", "input": referring(each)})
            response = await at.gateway.http.post("/v1/responses", content=body, headers=JSON)
            assert response.status_code == 400, (each, response.text)
            assert "there is no item" in response.text or "surrogate" in response.text
        await at.client.responses.delete(first.id)
        with pytest.raises(openai.BadRequestError, match=r"there is no item .* to refer to"):
            await create(model="demo", input=referring(name))
        assert len(at.router.submitted) == num_submitted + 1

    play(scenario)


def test_what_references_lead_to_counts_as_the_body_does() -> None:
    async def scenario(at: System) -> None:
        create: Any = at.client.responses.create
        large = {"type": "reasoning", "summary": [], "junk": "x" * 5_000_000}
        items = [await stored_input(at, large) for _ in range(2)]
        user = {"role": "user", "content": "x"}
        assert (await create(model="demo", input=referring(items[0], user))).status == "completed"
        for given in (
            {"input": referring(*items, user)},
            {"input": referring(items[0], items[0], user)},
            {"input": referring(items[0], {**large, "junk": "x" * 4_000_000}, user)},
        ):
            with pytest.raises(openai.APIStatusError, match="refers to") as found:
                await create(model="demo", **given)
            assert found.value.status_code == 413
        stems = [f"msg_{number:048x}0000" for number in range(MAX_TURNS + 1)]
        with pytest.raises(openai.BadRequestError, match=f"more than {MAX_TURNS} responses"):
            await create(model="demo", input=referring(*stems))

    play(scenario)


async def stored_input(at: System, item: Any) -> str:
    """Stores an item as the first of an input, and returns its id."""
    response = await at.gateway.http.post(
        "/v1/responses", json={"input": [item, {"role": "user", "content": "x"}]}
    )
    path = f"/v1/responses/{response.json()['id']}/input_items?order=asc&limit=1"
    found: str = (await at.gateway.http.get(path)).json()["data"][0]["id"]
    return found


@pytest.mark.parametrize("is_stream", [False, True])
def test_an_answer_without_any_text_has_an_empty_message(is_stream: bool) -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter(answer=answer_of(""))) as at:
            create: Any = at.client.responses.create
            found = await create(model="demo", input="How far?", stream=is_stream)
            if is_stream:
                events = await streamed(found)
                assert [event.type for event in events if "item" in event.type] == [
                    "response.output_item.added",
                    "response.output_item.done",
                ]
                found = events[-1].response
            (message,) = found.output
            assert message.type == "message" and message.status == "completed"
            assert [part.text for part in message.content] == [""]

    play_alone(scenario)


def test_references_to_items_of_one_conversation_are_looked_up_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    num_runs, run = 0, RedisConnection.run

    async def counted(redis: RedisConnection, script: str, *args: Any) -> Any:
        nonlocal num_runs
        num_runs += "items_named" in script
        return await run(redis, script, *args)

    monkeypatch.setattr(RedisConnection, "run", counted)

    async def scenario(at: System) -> None:
        create: Any = at.client.responses.create
        hello = [{"role": "user", "content": str(number)} for number in range(20)]
        made = await at.client.conversations.create(items=cast(Any, hello))
        kept = [each.id async for each in at.client.conversations.items.list(made.id, order="asc")]
        await create(model="demo", input=referring(*kept))
        assert num_runs == 1
        first = await create(model="demo", input=hello)
        asked = [each.id async for each in at.client.responses.input_items.list(first.id, order="asc")]
        await create(model="demo", input=referring(*asked))
        assert num_runs == 2
        prompts = [submit.request.prompt for submit in at.router.submitted]
        assert prompts == [TOKENIZER.chat_ids(hello)] * 3

    play(scenario)


def test_a_conversation_that_is_gone_takes_no_memory_for_bodies() -> None:
    async def scenario() -> None:
        memory = BodyMemory(1 << 20)
        async with redis_running() as redis, served(store_url=redis.url) as at:
            first = await at.client.responses.create(model="demo", input="Hello.")
            store = RedisStore(redis.url)
            try:
                await store._redis.unlink(f"{PREFIX}response-part:{first.id}:output")
                with memory.share("") as share:
                    with pytest.raises(ApiError, match="not found, or not complete"):
                        await KeptResponses(store.responses, 1 << 20).conversation(first.id, "", share, 0)
                    assert share.num_bytes == 0
            finally:
                await store.close()

    play_alone(scenario)


def test_references_to_a_response_that_is_deleted_meanwhile_take_no_memory_for_bodies() -> None:
    async def scenario() -> None:
        admitted: list[int] = []
        async with redis_running() as redis, served(store_url=redis.url) as at:
            create: Any = at.client.responses.create
            made = await create(model="demo", input=[{"role": "user", "content": "Hello."}])
            names = [each.id async for each in at.client.responses.input_items.list(made.id)]
            names += [item.id for item in made.output]
            store = RedisStore(redis.url)
            try:
                assert len(await stored_items(store.responses, names, "", admitted.append)) == 2
                assert len(admitted) == 2 and min(admitted) > 0
                admitted.clear()
                await store._redis.unlink(f"{PREFIX}response-part:{made.id}:output")
                assert await stored_items(store.responses, names, "", admitted.append) == []
                assert len(admitted) > 2 and sum(admitted) == 0
            finally:
                await store.close()

    play_alone(scenario)


@pytest.mark.parametrize("continued", ["previous_response_id", "conversation"])
def test_a_client_that_hangs_up_while_its_conversation_is_read_gives_back_its_memory_once(
    continued: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memories: list[BodyMemory] = []
    is_read, may_go_on = asyncio.Event(), asyncio.Event()
    new_memory, piece = access.body_memory, RedisConnection.piece

    def noted(*args: Any) -> BodyMemory:
        memories.append(new_memory(*args))
        return memories[-1]

    async def slowly(redis: RedisConnection, key: str, begin: int, end: int) -> bytes:
        is_read.set()
        await may_go_on.wait()
        return await piece(redis, key, begin, end)

    monkeypatch.setattr(process, "body_memory", noted)

    async def scenario() -> None:
        async with redis_running() as redis, served(store_url=redis.url) as at:
            create: Any = at.client.responses.create
            name = (await at.client.conversations.create()).id
            given = {"conversation": name} if continued == "conversation" else {}
            first = await create(model="demo", input="Hello.", **given)
            earlier = given or {continued: first.id}
            monkeypatch.setattr(RedisConnection, "piece", slowly)
            [memory] = memories
            asking = asyncio.create_task(at.post("/v1/responses", {"model": "demo", "input": "x", **earlier}))
            await is_read.wait()
            assert memory.num_bytes > len("Hello.")
            asking.cancel()
            await at.process.ending.drain_state.until_idle()
            may_go_on.set()
            # Another call, after which nothing of the first is left to do.
            await create(model="demo", input="y", **earlier)
            await at.process.ending.drain_state.until_idle()
            assert not memory._num_bytes

    play_alone(scenario)
