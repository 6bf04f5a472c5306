"""Anthropic's client: two turns with a tool each, whole and streamed."""

import os
from typing import Any

import anthropic

client = anthropic.Anthropic(base_url=os.environ["BASE_URL"].removesuffix("/v1"), api_key="none")
QUESTIONS = ("How warm is it in Rome?", "And in Milan?")
ANSWER = "It is 21 degrees in Rome."
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ASKED: Any = {"model": "demo", "max_tokens": 200, "tools": [{"name": "weather", "input_schema": SCHEMA}]}


def whole(messages: Any) -> Any:
    return client.messages.create(messages=messages, **ASKED)


def streamed(messages: Any) -> Any:
    with client.messages.stream(messages=messages, **ASKED) as stream:
        return stream.get_final_message()


for answer in (whole, streamed):
    messages: Any = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        asked = answer(messages)
        assert asked.stop_reason == "tool_use"
        (call,) = [block for block in asked.content if block.type == "tool_use"]
        assert call.input == {"city": "Rome"}
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "21 degrees"}
        messages += [{"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
        told = answer(messages)
        assert told.content[0].text == ANSWER and told.stop_reason == "end_turn"
        messages.append({"role": "assistant", "content": told.content})
