"""Anthropic's client: messages, streams, tools, counting."""

import os

import anthropic

client = anthropic.Anthropic(base_url=os.environ["BASE_URL"].removesuffix("/v1"), api_key="none")
QUESTION = [{"role": "user", "content": "Count from 7 to 9."}]
ANSWER = "7, 8, 9"
ASKED = {"model": "demo", "max_tokens": 100, "extra_body": {"temperature": 0}}
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}

message = client.messages.create(messages=QUESTION, **ASKED)
assert message.content[0].text == ANSWER and message.stop_reason == "end_turn"
count = client.messages.count_tokens(model="demo", messages=QUESTION)
assert count.input_tokens == message.usage.input_tokens

with client.messages.stream(messages=QUESTION, **ASKED) as stream:
    assert "".join(stream.text_stream) == ANSWER
    assert stream.get_final_message().usage.output_tokens == message.usage.output_tokens

tools = [{"name": "weather", "input_schema": WEATHER}]
one_call = {"type": "any", "disable_parallel_tool_use": True}
asked = client.messages.create(messages=QUESTION, tools=tools, tool_choice=one_call, **ASKED)
assert asked.stop_reason == "tool_use"
call = asked.content[-1]
assert call.name == "weather" and call.input["city"] in ("Rome", "Oslo")
result = {"type": "tool_result", "tool_use_id": call.id, "content": "Count from 7 to 9."}
messages = [*QUESTION, {"role": "assistant", "content": asked.content}, {"role": "user", "content": [result]}]
assert client.messages.create(messages=messages, tools=tools, **ASKED).content[0].text == ANSWER
