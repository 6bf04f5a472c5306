"""/v1/conversations with OpenAI's own client, and responses that belong to one; on a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, cast

import httpx2
import openai
import pytest
from openai.types.conversations import ConversationItem
from pydantic import TypeAdapter

from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.openai.responses.conversation_bodies import CREATE, Given
from alignedserve.gateway.openai.responses.conversations import MAX_LOOKS
from alignedserve.gateway.openai.responses.items import Items, messages_of
from alignedserve.store import ConversationHead, ResponseGone, StoreAway, StoreFull
from alignedserve.store.redis_conversations import RedisConversations
from alignedserve.store.redis_parts import PIECE_BYTES
from alignedserve.store.redis_responses import RedisResponses
from tests.gateway.batching import System, gateway_on, play
from tests.gateway.openai.responses.test_responses import streamed, until_over
from tests.gateway.scripted import MODEL, TOKENIZER
from tests.gateway.served import JSON, served
from tests.gateway.served import play as play_alone
from tests.gateway.test_fuzz import with_odd_values

CONVERSATIONS = "/v1/conversations"
HELLO: Any = {"role": "user", "content": "Hello."}
CALL: Any = {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"}
OUTPUT: Any = {"type": "function_call_output", "call_id": "c1", "output": "mild"}
SAID = "one two three"
ITEM: TypeAdapter[ConversationItem] = TypeAdapter(ConversationItem)


def message(role: str, text: str) -> dict[str, str]:
    return {"role": role, "content": text}


async def items_of(at: System, conversation_id: str, **query: Any) -> list[Any]:
    """All items, each of which is what OpenAI's type of it says."""
    query = {"order": "asc"} | query
    found = [each async for each in at.client.conversations.items.list(conversation_id, **query)]
    for each in found:
        ITEM.validate_json(each.model_dump_json(exclude_unset=True))
    return found


async def texts_of(at: System, conversation_id: str) -> list[str]:
    return [each.content[0].text for each in await items_of(at, conversation_id)]


def test_a_conversation_is_made_changed_and_deleted() -> None:
    async def scenario(at: System) -> None:
        conversations = at.client.conversations
        plain = await conversations.create()
        assert plain.object == "conversation" and plain.metadata == {} and plain.id.startswith("conv_")
        made = await conversations.create(items=[HELLO], metadata={"a": 'b"\u00e9'})
        assert made.metadata == {"a": 'b"\u00e9'}
        assert await conversations.retrieve(made.id) == made
        changed = await conversations.update(made.id, metadata={"c": "d"})
        assert changed.metadata == {"c": "d"} and changed.created_at == made.created_at
        assert (await conversations.update(made.id, metadata=None)).metadata == {}
        assert await conversations.retrieve(made.id) == made.model_copy(update={"metadata": {}})
        gone = await conversations.delete(made.id)
        assert (gone.id, gone.object, gone.deleted) == (made.id, "conversation.deleted", True)
        for call in (
            conversations.retrieve(made.id),
            conversations.update(made.id, metadata={}),
            conversations.delete(made.id),
            conversations.items.create(made.id, items=[HELLO]),
            conversations.items.retrieve("msg_1", conversation_id=made.id),
            conversations.items.delete("msg_1", conversation_id=made.id),
            at.client.responses.create(model="demo", input="x", conversation=made.id),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert not at.router.submitted

    play(scenario)


def test_items_are_added_listed_and_deleted() -> None:
    async def scenario(at: System) -> None:
        items = at.client.conversations.items
        made = await at.client.conversations.create(items=[HELLO, CALL])
        reasoning: Any = {"type": "reasoning", "id": "rs_1", "summary": []}
        answer: Any = message("assistant", "Hm.")
        added = await items.create(made.id, items=[OUTPUT, reasoning, answer])
        assert [each.type for each in added.data] == ["function_call_output", "reasoning", "message"]
        assert (added.first_id, added.last_id, added.has_more) == (added.data[0].id, added.data[2].id, False)
        for order in ("asc", "desc"):
            for limit in (1, 2, 100):
                found = await items_of(at, made.id, order=order, limit=limit)
                kinds = ["message", "function_call", "function_call_output", "reasoning", "message"]
                assert [each.type for each in found] == (kinds if order == "asc" else kinds[::-1])
        whole = await items_of(at, made.id)
        assert whole[0].content[0].type == "input_text" and whole[0].content[0].text == "Hello."
        assert whole[4].content[0].type == "output_text" and whole[2:] == added.data
        one = await items.retrieve(
            whole[1].id, conversation_id=made.id, include=["reasoning.encrypted_content"]
        )
        assert one == whole[1]
        assert await items.delete(whole[1].id, conversation_id=made.id) == made
        assert await items_of(at, made.id) == [whole[0], *whole[2:]]
        for name in (whole[1].id, "msg_x", "%ED%A0%80"):
            with pytest.raises(openai.NotFoundError):
                await items.retrieve(name, conversation_id=made.id)
        with pytest.raises(openai.NotFoundError):
            await items.delete(whole[1].id, conversation_id=made.id)
        with pytest.raises(openai.BadRequestError):
            await items.list(made.id, after=whole[1].id)
        none = await items.create(made.id, items=[])
        assert none.data == [] and none.first_id is None

    play(scenario)


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_stored", [False, True])
def test_responses_of_a_conversation_go_on_with_it_and_add_to_it(is_stream: bool, is_stored: bool) -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create(items=[HELLO])

        async def ask(text: str, conversation: Any) -> Any:
            create: Any = at.client.responses.create
            found = await create(
                model="demo", input=text, conversation=conversation, stream=is_stream, store=is_stored
            )
            return (await streamed(found))[-1].response if is_stream else found

        first = await ask("How far?", made.id)
        second = await ask("And back?", {"id": made.id})
        assert first.conversation.id == second.conversation.id == made.id
        turns = [
            HELLO,
            message("user", "How far?"),
            message("assistant", SAID),
            message("user", "And back?"),
        ]
        assert at.router.submitted[1].request.prompt == TOKENIZER.chat_ids(turns)
        assert await texts_of(at, made.id) == ["Hello.", "How far?", SAID, "And back?", SAID]
        found = await items_of(at, made.id)
        assert [found[2].id, found[4].id] == [first.output[0].id, second.output[0].id]
        if is_stored:
            assert (await at.client.responses.retrieve(first.id)).conversation == first.conversation
            with pytest.raises(openai.BadRequestError, match="belongs to a conversation"):
                await at.client.responses.create(model="demo", input="x", previous_response_id=first.id)
            await at.client.responses.delete(first.id)
            assert len(await items_of(at, made.id)) == 5

    play(scenario)


def test_a_turn_is_added_without_log_probabilities() -> None:
    async def scenario(at: System) -> None:
        create: Any = at.client.responses.create
        for is_stored in (True, False):
            made = await at.client.conversations.create()
            include = ["message.output_text.logprobs"]
            done = await create(
                model="demo",
                input="x",
                include=include,
                top_logprobs=20,
                conversation=made.id,
                store=is_stored,
            )
            assert done.output[0].content[0].logprobs
            _, item = await items_of(at, made.id)
            assert item.content[0].text == SAID and item.content[0].logprobs == []

    play(scenario)


def test_a_reference_is_to_an_item_of_the_conversation_and_goes_with_it() -> None:
    async def scenario(at: System) -> None:
        create: Any = at.client.responses.create
        made = await at.client.conversations.create(items=[HELLO])
        (hello,) = await items_of(at, made.id)
        reference = {"type": "item_reference", "id": hello.id}
        await create(model="demo", input=[reference], conversation=made.id)
        assert at.router.submitted[0].request.prompt == TOKENIZER.chat_ids([HELLO, HELLO])
        await at.client.conversations.items.delete(hello.id, conversation_id=made.id)
        await create(model="demo", input="x", conversation=made.id)
        turns = [message("assistant", SAID), message("user", "x")]
        assert at.router.submitted[1].request.prompt == TOKENIZER.chat_ids(turns)

    play(scenario)


def test_the_tokens_of_an_input_are_counted_with_the_conversation() -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create(items=[HELLO])
        asked: Any = {"input": "x", "conversation": made.id}
        counted = await at.client.responses.input_tokens.count(model="demo", **asked)
        assert len(await items_of(at, made.id)) == 1
        answered = await at.client.responses.create(model="demo", **asked)
        assert answered.usage and counted.input_tokens == answered.usage.input_tokens

    play(scenario)


WRONG: list[tuple[str, Any, str]] = [
    ("", {"items": [HELLO] * 21}, "items"),
    ("", {"items": ["x"]}, "items"),
    ("", {"items": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "items"),
    ("", {"items": [{"type": "item_reference", "id": "x"}]}, "items"),
    ("", {"items": [{"role": "user", "content": "\ud800"}]}, "items"),
    ("", {"metadata": {"a": 5}}, "metadata"),
    ("", {"metadata": {"a" * 65: "b"}}, "metadata"),
    ("", {"metadata": {"a": "\ud800"}}, "metadata"),
    ("/NAME", {}, "metadata"),
    ("/NAME/items", {}, "items"),
    ("/NAME/items", {"items": None}, "items"),
    ("/NAME/items?include=5&limit=x", {"items": [5]}, "items"),
]


def test_what_is_wrong_is_named() -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create()
        for path, body, param in WRONG:
            url = CONVERSATIONS + path.replace("NAME", made.id)
            # httpx2 sends no halves of surrogate pairs
            response = await at.gateway.http.post(url, content=json.dumps(body), headers=JSON)
            assert response.status_code == 400, (body, response.text)
            assert response.json()["error"]["param"] == param, (body, response.text)
        assert await items_of(at, made.id) == []

    play(scenario)


def test_odd_values_are_kept_or_refused() -> None:
    text = {"type": "input_text", "text": "x"}
    items = [
        {"type": "message", "role": "user", "content": [text], "id": "m", "status": "completed"},
        {"role": "assistant", "content": "y"},
        {"type": "reasoning", "id": "r", "summary": [text], "content": [text]},
        CALL | {"id": "c", "status": "completed"},
        OUTPUT | {"output": [text]},
    ]
    num_kept = 0
    for body in with_odd_values({"items": items, "metadata": {"a": "b"}}):
        with suppress(ApiError):
            made = CREATE.prepare(json.dumps(body).encode(), MODEL, CallLimits())
            assert isinstance(made, Given)
            kept = json.loads(b"[%b]" % made.items)
            assert [each["id"] for each in kept] == [
                json.loads(line.partition(" ")[2]) for line in made.index.decode().splitlines()
            ]
            messages_of(Items(kept).all)
            num_kept += 1
    assert num_kept > 50


def test_a_response_has_one_conversation() -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create()
        create: Any = at.client.responses.create
        for conversation in (made.id, {"id": made.id}):
            with pytest.raises(openai.BadRequestError, match="not together"):
                await create(
                    model="demo", input="x", conversation=conversation, previous_response_id="resp_1"
                )
        wrong: list[Any] = [5, {}, {"id": 5}, "c" * 200]
        for conversation in wrong:
            with pytest.raises(openai.BadRequestError, match="conversation"):
                await create(model="demo", input="x", conversation=conversation)
        # it is no response
        with pytest.raises(openai.NotFoundError):
            await at.client.responses.retrieve(made.id)
        done = await create(model="demo", input="x")
        with pytest.raises(openai.NotFoundError):
            await at.client.conversations.retrieve(done.id)

    play(scenario)


def test_without_a_store_there_are_none() -> None:
    async def scenario() -> None:
        async with served() as at:
            with pytest.raises(openai.BadRequestError):
                await at.client.conversations.create()
            with pytest.raises(openai.NotFoundError):
                await at.client.responses.create(model="demo", input="x", conversation="conv_1")

    play_alone(scenario)


# ---- sizes ----


@pytest.mark.slow
def test_a_conversation_counts_as_the_body_does() -> None:
    async def scenario(at: System) -> None:
        post = at.gateway.http.post
        large = HELLO | {"id": "msg_large", "junk": "x" * 5_000_000}
        made = (await post(CONVERSATIONS, json={"items": [large]})).json()
        path = f"{CONVERSATIONS}/{made['id']}/items"
        refused = await post(path, json={"items": [HELLO | {"junk": "x" * 4_000_000}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (413, "conversation_full")
        asked = {"conversation": made["id"], "input": [HELLO | {"junk": "x" * 4_000_000}]}
        refused = await post("/v1/responses", json=asked)
        assert refused.status_code == 413 and "conversation" in refused.text
        reference = {"type": "item_reference", "id": "msg_large"}
        refused = await post("/v1/responses", json={"conversation": made["id"], "input": [reference]})
        assert refused.status_code == 413 and not at.router.submitted
        # what is deleted makes room
        assert (await at.gateway.http.delete(f"{path}/msg_large")).status_code == 200
        assert (await post("/v1/responses", json=asked)).status_code == 200

    play(scenario)


@pytest.mark.slow
def test_items_are_listed_however_large_they_are_and_wherever_there_are_gaps() -> None:
    async def scenario(at: System) -> None:
        items: Any = at.client.conversations.items
        for size in (10, 20_000, PIECE_BYTES):
            given = [HELLO | {"id": f"msg_{number}", "junk": str(number) * size} for number in range(5)]
            made = await at.client.conversations.create(items=given)
            for deleted, numbers in ((None, "01234"), ("msg_1", "0234"), ("msg_4", "023")):
                if deleted:
                    await items.delete(deleted, conversation_id=made.id)
                for order in ("asc", "desc"):
                    path = f"{CONVERSATIONS}/{made.id}/items?order={order}"
                    found = (await at.gateway.http.get(path)).json()["data"]
                    expected = numbers if order == "asc" else numbers[::-1]
                    assert [each["junk"] for each in found] == [number * size for number in expected]
            asked = {"model": "demo", "input": "x", "conversation": made.id}
            await at.gateway.http.post("/v1/responses", json=asked)
            turns = [HELLO] * 3 + [message("user", "x")]
            assert at.router.submitted[-1].request.prompt == TOKENIZER.chat_ids(turns)

    play(scenario)


def test_a_turn_for_which_there_is_no_room_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next turn would be answered without it."""

    async def scenario(at: System) -> None:
        made = await at.client.conversations.create()
        monkeypatch.setattr("alignedserve.gateway.openai.responses.conversations.MAX_GROWTH", 0)
        create: Any = at.client.responses.create
        with pytest.raises(openai.APIStatusError, match="delete some"):
            await create(model="demo", input="x", conversation=made.id)
        failed = await streamed(await create(model="demo", input="x", conversation=made.id, stream=True))
        assert failed[-1].type == "response.failed"
        later = await create(model="demo", input="x", conversation=made.id, background=True)
        failure = (await until_over(at, later)).error
        # which OpenAI's type does not have
        assert failure and failure.code == cast(Any, "conversation_full")
        assert await items_of(at, made.id) == []

    play(scenario)


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_turn_that_the_store_does_not_take_is_an_error(
    is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    error: Exception

    async def refusing(*args: Any) -> None:
        raise error

    async def scenario(at: System) -> None:
        nonlocal error
        made = await at.client.conversations.create()
        monkeypatch.setattr(RedisConversations, "append", refusing)
        monkeypatch.setattr(RedisResponses, "add", refusing)
        monkeypatch.setattr("alignedserve.store.retry.PATIENCE_S", 0.3)
        body: dict[str, Any] = {"model": "demo", "input": "x", "store": is_stored}
        for error, status, code in (  # noqa: B007
            (StoreFull("delete some"), 413, "storage_full"),
            (StoreAway("it hangs"), 503, "overloaded"),
        ):
            refused = await at.gateway.http.post("/v1/responses", json=body | {"conversation": made.id})
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code), refused.text
            assert "hangs" not in refused.text
            plain = await at.gateway.http.post("/v1/responses", json=body)
            assert plain.status_code == 200 and plain.json()["store"] is False
        assert await items_of(at, made.id) == []

    play(scenario)


# ---- races ----


def test_turns_of_two_responses_at_once_are_each_together_and_in_the_order_of_their_ends() -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create(items=[HELLO])
        at.router.allow(0)
        create: Any = at.client.responses.create
        asked = [
            asyncio.create_task(create(model="demo", input=f"q{number}", conversation=made.id))
            for number in range(4)
        ]
        while len(at.router.submitted) < 4:
            await asyncio.sleep(0.01)
        assert await texts_of(at, made.id) == ["Hello."]
        at.router.allow(1000)
        await asyncio.gather(*asked)
        texts = await texts_of(at, made.id)
        assert texts[2::2] == [SAID] * 4 and sorted(texts[1::2]) == ["q0", "q1", "q2", "q3"]

    play(scenario)


@pytest.mark.parametrize("more", [{}, {"store": False}, {"background": True}], ids=str)
def test_a_conversation_that_is_deleted_under_way_is_not_added_to(more: dict[str, Any]) -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create(items=[HELLO])
        at.router.allow(0)
        create: Any = at.client.responses.create
        asked = asyncio.create_task(create(model="demo", input="x", conversation=made.id, **more))
        while not at.router.submitted:
            await asyncio.sleep(0.01)
        await at.client.conversations.delete(made.id)
        at.router.allow(1000)
        done = await until_over(at, await asked)
        assert done.output_text == SAID
        with pytest.raises(openai.NotFoundError):
            await at.client.conversations.retrieve(made.id)

    play(scenario)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "a?b", "a#b"])
def test_an_item_has_an_id_by_which_it_can_be_found(name: str) -> None:
    async def scenario(at: System) -> None:
        with pytest.raises(openai.BadRequestError, match="a part of a path"):
            await at.client.conversations.create(items=[HELLO | {"id": name}])

    play(scenario)


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_turn_that_was_begun_in_a_conversation_is_not_refused_at_its_end(
    is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("alignedserve.gateway.openai.responses.conversations.MAX_ITEMS", 3)

    async def scenario(at: System) -> None:
        made = await at.client.conversations.create(items=[HELLO, HELLO])
        create: Any = at.client.responses.create
        done = await create(model="demo", input="x", conversation=made.id, store=is_stored)
        assert done.output_text == SAID
        assert len([each async for each in at.client.conversations.items.list(made.id)]) == 4

    play(scenario)


def test_an_item_that_is_deleted_while_a_turn_refers_to_it_leaves_the_conversation_usable() -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create(items=[HELLO | {"id": "msg_1"}])
        at.router.allow(0)
        create: Any = at.client.responses.create
        refers: Any = [{"type": "item_reference", "id": "msg_1"}]
        asked = asyncio.create_task(create(model="demo", input=refers, conversation=made.id))
        while not at.router.submitted:
            await asyncio.sleep(0.01)
        await at.client.conversations.items.delete("msg_1", conversation_id=made.id)
        at.router.allow(1000)
        assert (await asked).output_text == SAID
        assert (await create(model="demo", input="again", conversation=made.id)).output_text == SAID

    play(scenario)


def test_a_background_response_adds_its_turn_when_it_ends_and_a_cancelled_one_none() -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create()
        create: Any = at.client.responses.create
        at.router.allow(0)
        cancelled = await create(model="demo", input="no", conversation=made.id, background=True)
        done = await create(model="demo", input="yes", conversation=made.id, background=True)
        await at.client.responses.cancel(cancelled.id)
        assert await items_of(at, made.id) == []
        at.router.allow(1000)
        assert (await until_over(at, done)).conversation == done.conversation
        assert done.conversation.id == made.id and await texts_of(at, made.id) == ["yes", SAID]

    play(scenario)


def test_a_turn_that_two_gateways_answer_is_added_once() -> None:
    """The first one hangs: its lease lapses, and what it has to add when it wakes up is not added."""

    async def scenario(at: System) -> None:
        made = await at.client.conversations.create()
        at.router.allow(0)
        create: Any = at.client.responses.create
        begun = await create(model="demo", input="x", conversation=made.id, background=True)
        while not at.router.submitted:
            await asyncio.sleep(0.01)
        background = at.gateway.process._services._background
        assert background
        (first,) = background._leased.tasks.values()

        async def look() -> None:
            raise StoreAway("it hangs")

        background._poller._look = look
        async with gateway_on(at.router_port, at.redis.url, name="gateway-1"):
            while len(at.router.submitted) < 2:
                await asyncio.sleep(0.01)
            at.router.allow(None)
            await until_over(at, begun)
            await first
        assert await texts_of(at, made.id) == ["x", SAID]

    play(scenario)


def test_a_conversation_that_is_gone_at_a_responses_turn_fails_it() -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create()
        background = at.gateway.process._services._background
        assert background
        look, is_away = background._poller._look, True

        async def looking() -> None:
            if not is_away:
                await look()

        background._poller._look = looking
        create: Any = at.client.responses.create
        begun = await create(model="demo", input="x", conversation=made.id, background=True)
        await at.client.conversations.delete(made.id)
        is_away = False
        done = await until_over(at, begun)
        assert done.status == "failed" and done.error and "Conversation" in done.error.message

    play(scenario)


def test_a_conversation_expires(monkeypatch: pytest.MonkeyPatch) -> None:
    async def scenario(at: System) -> None:
        made = await at.client.conversations.create(items=[HELLO])
        monkeypatch.setattr("alignedserve.gateway.openai.responses.conversations.KEPT_S", -1)
        await at.client.conversations.items.create(made.id, items=[HELLO])
        with pytest.raises(openai.NotFoundError):
            while True:
                await at.client.conversations.retrieve(made.id)
                await asyncio.sleep(0.02)

    play(scenario)


def test_what_changes_while_it_is_read_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pieces, left = RedisConversations.pieces, 0

    def changing(store: RedisConversations, head: ConversationHead, begin: int, end: int) -> Any:
        nonlocal left
        if left > 0:
            left -= 1
            raise ResponseGone(head.id)
        return pieces(store, head, begin, end)

    async def scenario(at: System) -> None:
        nonlocal left
        made = await at.client.conversations.create(items=[HELLO | {"id": "msg_1"}])
        path = f"{CONVERSATIONS}/{made.id}/items"
        monkeypatch.setattr(RedisConversations, "pieces", changing)
        calls: list[Callable[[], Awaitable[httpx2.Response]]] = [
            lambda: at.gateway.http.get(path),
            lambda: at.gateway.http.get(f"{path}/msg_1"),
            lambda: at.gateway.http.post("/v1/responses", json={"input": "x", "conversation": made.id}),
        ]
        for call in calls:
            for num_changes, status in ((1, 200), (MAX_LOOKS, 503)):
                left = num_changes
                response = await call()
                assert (response.status_code, left) == (status, 0), response.text

    play(scenario)


@pytest.mark.parametrize("is_stored", [False, True])
def test_a_turn_whose_answer_of_the_store_is_lost_is_added_once(
    is_stored: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing(method: Any) -> Any:
        is_lost = False

        async def call(*args: Any) -> Any:
            nonlocal is_lost
            found = await method(*args)
            if not is_lost:
                is_lost = True
                raise StoreAway("the answer is lost")
            return found

        return call

    async def scenario(at: System) -> None:
        made = await at.client.conversations.create()
        monkeypatch.setattr(RedisConversations, "append", losing(RedisConversations.append))
        monkeypatch.setattr(RedisResponses, "add", losing(RedisResponses.add))
        create: Any = at.client.responses.create
        assert (
            await create(model="demo", input="x", conversation=made.id, store=is_stored)
        ).output_text == SAID
        assert len(await items_of(at, made.id)) == 2
        await at.client.conversations.items.create(made.id, items=[HELLO])
        assert len(await items_of(at, made.id)) == 3

    play(scenario)
