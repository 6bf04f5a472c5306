"""/v1/responses/compact with OpenAI's own client: the user's messages, and a summary that the next call reads."""

from __future__ import annotations

import base64
from typing import Any

import openai
import pytest

from alignedserve.gateway.http.keys import owners_of
from alignedserve.gateway.openai.responses.compaction import MAX_SUMMARY_TOKENS
from tests.gateway.scripted import TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import Served, SharedGateway, play, served
from tests.store.redis_process import redis_running

TURNS: list[Any] = [
    {"role": "user", "content": "How far is the sun?"},
    {"role": "assistant", "content": "Very far."},
    {"type": "function_call", "call_id": "c", "name": "measure", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "8 minutes"},
    {"role": "user", "content": [{"type": "input_text", "text": "By light?"}]},
]


def prompt_of(at: Served) -> str:
    return TOKENIZER.decode(at.router.submitted[-1].request.prompt, skip_special_tokens=False)


def test_the_users_messages_and_a_summary_continue_the_conversation(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        done = await at.client.responses.compact(model="demo", input=TURNS, instructions="Be brief.")
        assert done.object == "response.compaction" and done.usage.output_tokens > 0
        *asked, last = done.output
        assert [item.content[0].text for item in asked] == ["How far is the sun?", "By light?"]  # type: ignore[union-attr, index]
        assert last.type == "compaction"
        assert base64.b64decode(last.encrypted_content).decode() == "one two three"
        # The model sees all of it, and the request.
        prompt, params = prompt_of(at), at.router.submitted[-1].request.params
        assert "8 minutes" in prompt and "Be brief." in prompt and "Summarize this conversation" in prompt
        assert params.max_tokens == MAX_SUMMARY_TOKENS

        items = [item.model_dump(exclude_none=True, warnings=False) for item in done.output]
        following: list[Any] = [*items, {"role": "user", "content": "And the moon?"}]
        await at.client.responses.create(model="demo", input=following)
        prompt = prompt_of(at)
        for text in ("How far is the sun?\n\nBy light?", "one two three", "And the moon?"):
            assert text in prompt
        assert "8 minutes" not in prompt
        # A compaction of a compaction has the same messages.
        again = await at.client.responses.compact(model="demo", input=following)
        assert [item.type for item in again.output] == ["message"] * 3 + ["compaction"]
        assert "one two three" in prompt_of(at)

    gateway.play(scenario)


def test_what_can_not_be_compacted_is_refused(gateway: SharedGateway) -> None:
    async def scenario(at: Served) -> None:
        for body, message in (
            ({}, "input: there is nothing to compact"),
            ({"input": "x", "stream": True}, "stream=True: not possible"),
            ({"input": "x", "background": True}, "background=True: not possible"),
            (
                {"input": [{"type": "compaction", "encrypted_content": "gAAA*"}]},
                "input: a compaction item that",
            ),
            (
                {"input": [{"type": "compaction", "encrypted_content": "/w=="}]},
                "input: a compaction item that",
            ),
            ({"input": [{"type": "compaction"}]}, "input: an item of type 'compaction' is not complete"),
            ({"input": "x", "previous_response_id": "resp_x"}, "previous_response_id"),
        ):
            answer = await at.post("/v1/responses/compact", body)
            assert answer.status_code in (400, 404) and message in answer.text, answer.text
        assert not at.router.submitted

    gateway.play(scenario)


@pytest.mark.parametrize(
    ("text", "given", "status", "message"),
    [
        ("one two three", {"max_output_tokens": 2}, 400, "max_output_tokens: the summary is not complete"),
        (" \n", {}, 500, "the model has written no summary"),
    ],
)
def test_a_summary_that_is_empty_or_cut_is_an_error(
    text: str, given: dict[str, int], status: int, message: str
) -> None:
    """The client would go on without its conversation."""

    async def scenario() -> None:
        async with served(ScriptedRouter(answer=answer_of(text))) as at:
            answer = await at.post("/v1/responses/compact", {"input": TURNS} | given)
            assert answer.status_code == status and message in answer.text, answer.text

    play(scenario)


def test_a_stored_conversation_is_compacted_for_its_owner_alone() -> None:
    async def scenario() -> None:
        async with (
            redis_running() as redis,
            served(store_url=redis.url, key_owners=owners_of(["a", "b"], None)) as at,
        ):
            mine, other = at.client.with_options(api_key="a"), at.client.with_options(api_key="b")
            first = await mine.responses.create(model="demo", input="How far?")
            done = await mine.responses.compact(model="demo", previous_response_id=first.id)
            assert [item.type for item in done.output] == ["message", "compaction"]
            items: list[Any] = [item.model_dump(exclude_none=True, warnings=False) for item in done.output]
            second = await mine.responses.create(
                model="demo", input=[*items, {"role": "user", "content": "So?"}]
            )
            # The item is stored with the input, and the chain continues.
            listed = [item.type async for item in mine.responses.input_items.list(second.id, order="asc")]
            assert listed == ["message", "compaction", "message"]
            third = await mine.responses.create(model="demo", input="?", previous_response_id=second.id)
            assert third.status == "completed" and "Summary of the conversation" in prompt_of(at)
            with pytest.raises(openai.BadRequestError, match="not found"):
                await other.responses.compact(model="demo", previous_response_id=first.id)

    play(scenario)
