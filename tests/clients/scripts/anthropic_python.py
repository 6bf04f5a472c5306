"""Anthropic's client: messages, streams, tools, counting, message batches."""

import os
import time
from typing import Any

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


# ---- message batches ----


def request(name: str, **more: Any) -> Any:
    params = {"model": "demo", "max_tokens": 100, "messages": QUESTION, "temperature": 0}
    return {"custom_id": name, "params": params | more}


def ended(batch: Any) -> Any:
    while batch.processing_status != "ended":
        time.sleep(0.1)
        batch = client.messages.batches.retrieve(batch.id)
    return batch


batches = client.messages.batches
made = batches.create(requests=[request("good"), request("bad", temperature=-1)])
assert made.request_counts.processing == 2 and made.results_url is None
assert (made.expires_at - made.created_at).total_seconds() == 86400
batch = ended(made)
assert (batch.request_counts.succeeded, batch.request_counts.errored) == (1, 1)
results = {each.custom_id: each.result for each in batches.results(batch.id)}
assert results["good"].type == "succeeded" and results["good"].message.content[0].text == ANSWER
assert results["bad"].type == "errored" and results["bad"].error.error.type == "invalid_request_error"

# Its requests are far too long to be answered before they are cancelled.
long = batches.create(requests=[request(f"{n}", max_tokens=1000, ignore_eos=True) for n in range(200)])
try:
    batches.delete(long.id)
    raise AssertionError("a batch that runs was deleted")
except anthropic.BadRequestError as error:
    assert "has not ended" in error.message
assert batches.cancel(long.id).cancel_initiated_at
batch = ended(long)
assert batch.request_counts.canceled and batch.request_counts.processing == 0
types = [each.result.type for each in batches.results(long.id)]
assert len(types) == 200 and types.count("canceled") == batch.request_counts.canceled

assert [each.id for each in batches.list(limit=1)][:2] == [long.id, made.id]
assert [each.id for each in batches.list(before_id=made.id)] == [long.id]
assert batches.delete(made.id).type == "message_batch_deleted"
try:
    batches.retrieve(made.id)
    raise AssertionError("a batch that was deleted is there")
except anthropic.NotFoundError:
    pass
