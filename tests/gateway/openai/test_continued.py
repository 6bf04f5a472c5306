"""Answers that continue the assistant's message: `continue_final_message`, `echo` of chats, and Anthropic's prefill."""

from __future__ import annotations

from typing import Any

import pytest

from tests.gateway.anthropic.test_messages import events_of, message_of
from tests.gateway.scripted import TOKENIZER, ScriptedRouter, answer_of
from tests.gateway.served import QUESTION, Served, play, served
from tests.gateway.tools.test_harmony import HARMONY, said
from tests.gateway.tools.test_reasoning import QWEN
from tests.gateway.tools.test_tools import CALL, TEMPLATE, WEATHER, model_with

CHATS, MESSAGES = "/v1/chat/completions", "/v1/messages"
BEGUN = [*QUESTION, {"role": "assistant", "content": "It is"}]
CONTINUED = {"messages": BEGUN, "continue_final_message": True, "add_generation_prompt": False}
# It ends each turn, and begins the assistant's.
TURNS = TEMPLATE.replace("{% endfor %}{% endfor %}", "{% endfor %}<|end|>{% endfor %}") + (
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PROMPT = "user: How far?<|end|>assistant: It is"


def prompt_of(at: Served) -> str:
    return TOKENIZER.decode(at.router.submitted[-1].request.prompt, skip_special_tokens=False)


async def chat(at: Served, **body: Any) -> dict[str, Any]:
    """The message of the first choice, whole, and the same as a stream has it."""
    response = await at.post(CHATS, body)
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    create: Any = at.client.chat.completions.create
    options = {"model": "demo", "messages": body.pop("messages"), "tools": body.pop("tools", [])}
    chunks = [chunk async for chunk in await create(**options, stream=True, extra_body=body)]
    choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == 0]
    deltas = [choice.delta.model_dump() for choice in choices]
    for name in ("content", "reasoning_content"):
        streamed = "".join(delta.get(name) or "" for delta in deltas)
        assert streamed == (message.get(name) or "")
    return message


def test_a_chat_continues_its_last_message() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter(answer=answer_of(" far.")), model=model_with(TURNS)) as at:
            assert (await chat(at, **CONTINUED))["content"] == " far."
            assert prompt_of(at) == PROMPT
            for begun in ("It is", [{"type": "text", "text": "It is"}]):
                messages = [*QUESTION, {"role": "assistant", "content": begun}]
                found = await chat(at, messages=messages, continue_final_message=True, echo=True, n=2)
                assert found["content"] == "It is far." and prompt_of(at) == PROMPT
            # As in vLLM, `echo` also shows a last message that the answer does not continue, but none of the user.
            assert (await chat(at, messages=BEGUN, echo=True))["content"] == "It is far."
            assert prompt_of(at) == PROMPT + "<|end|>assistant: "
            assert (await chat(at, messages=QUESTION, echo=True))["content"] == " far."
            tokenized = await at.post("/tokenize", CONTINUED)
            assert TOKENIZER.decode(tokenized.json()["tokens"], skip_special_tokens=False) == PROMPT

    play(scenario)


def test_a_message_continues_its_last_turn_whole_and_streamed() -> None:
    async def scenario() -> None:
        async with served(ScriptedRouter(answer=answer_of(" far.")), model=model_with(TURNS)) as at:
            for content in ("It is", [{"type": "text", "text": "It is"}]):
                messages = [*QUESTION, {"role": "assistant", "content": content}]
                body = {"messages": messages, "max_tokens": 50}
                response = await at.post(MESSAGES, body)
                assert response.json()["content"] == [{"type": "text", "text": " far."}]
                assert prompt_of(at) == PROMPT
                counted = await at.post(f"{MESSAGES}/count_tokens", body)
                assert counted.json()["input_tokens"] == len(at.router.submitted[-1].request.prompt)
                streamed = await at.post(MESSAGES, body | {"stream": True})
                assert message_of(events_of(streamed.text))["content"][0]["text"] == " far."
                assert prompt_of(at) == PROMPT

    play(scenario)


def test_what_is_read_begins_after_the_continued_text() -> None:
    """A call and the rest of a thought are read; a turn that has begun to answer does not think first."""

    async def scenario() -> None:
        answer = f" see.</think>Now.{CALL}"
        async with served(ScriptedRouter(answer=answer_of(answer)), model=model_with(QWEN)) as at:
            for begun, content, thoughts in (
                ("<think>Let me", "Now.", " see."),
                ("<think>a</think>So:", " see.</think>Now.", None),
                ("It is", " see.</think>Now.", None),
            ):
                messages = [*QUESTION, {"role": "assistant", "content": begun}]
                found = await chat(at, messages=messages, continue_final_message=True, tools=[WEATHER])
                assert (found["content"], found.get("reasoning_content")) == (content, thoughts)
                assert found["tool_calls"][0]["function"]["name"] == "weather"

    play(scenario)


def test_a_harmony_model_continues_its_final_text() -> None:
    async def scenario() -> None:
        async with served(said(" far."), model=HARMONY) as at:
            assert (await chat(at, **CONTINUED))["content"] == " far."
            prompt = HARMONY.tokenizer.decode(
                at.router.submitted[-1].request.prompt, skip_special_tokens=False
            )
            assert prompt.endswith("<|start|>assistant<|channel|>final<|message|>It is")
            refused = await at.post(CHATS, CONTINUED | {"tools": [WEATHER], "tool_choice": "required"})
            assert refused.status_code == 400 and "can't continue" in refused.text

    play(scenario)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"messages": QUESTION}, "the last message must be the assistant's"),
        ({"messages": [*BEGUN[:1], {"role": "assistant", "content": None}]}, "the last message must be"),
        ({"messages": [*BEGUN[:1], BEGUN[1] | {"tool_calls": [{}]}]}, "without calls"),
        ({"messages": BEGUN, "add_generation_prompt": True}, "not together with add_generation_prompt"),
    ],
)
def test_what_can_not_be_continued_is_refused(body: dict[str, Any], reason: str) -> None:
    async def scenario() -> None:
        async with served() as at:
            response = await at.post(CHATS, body | {"continue_final_message": True})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "continue_final_message")
            assert reason in error["message"]

    play(scenario)


def test_a_template_that_can_not_continue_is_named() -> None:
    async def scenario() -> None:
        model = model_with("{% for message in messages %}{{ message.content | upper }}{% endfor %}")
        async with served(model=model) as at:
            for path, body in ((CHATS, CONTINUED), (MESSAGES, {"messages": BEGUN, "max_tokens": 5})):
                response = await at.post(path, body)
                assert response.status_code == 400, response.text
                assert "chat template can't continue the last one" in response.text

    play(scenario)
