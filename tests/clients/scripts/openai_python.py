"""OpenAI's client for Python: chats, streams, tools, structured outputs, responses, embeddings, files and
batches."""

import io
import json
import os
import time
from typing import Any, Literal

import openai
from pydantic import BaseModel

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none")
QUESTION: Any = [{"role": "user", "content": "Count from 7 to 9."}]
ANSWER = "7, 8, 9"
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}

assert [each.id for each in client.models.list()] == ["demo"]

# a chat, with fields that are newer than most servers
chat = client.chat.completions.create(
    model="demo", messages=QUESTION, temperature=0, reasoning_effort="low", verbosity="low", store=False
)
assert chat.choices[0].message.content == ANSWER
assert chat.usage and chat.usage.total_tokens == chat.usage.prompt_tokens + chat.usage.completion_tokens

# a stream, with its usage
stream = client.chat.completions.create(
    model="demo", messages=QUESTION, temperature=0, stream=True, stream_options={"include_usage": True}
)
chunks = list(stream)
assert "".join(each.choices[0].delta.content or "" for each in chunks if each.choices) == ANSWER
assert chunks[-1].usage and chunks[-1].usage.completion_tokens == chat.usage.completion_tokens

# a call of a function, and what the model says of its result
tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": WEATHER}}]
asked = client.chat.completions.create(
    model="demo", messages=QUESTION, tools=tools, tool_choice="required", parallel_tool_calls=False
)
(call,) = (asked.choices[0].message.tool_calls or [])[:1]
assert call.type == "function"
assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
result = {"role": "tool", "tool_call_id": call.id, "content": "Count from 7 to 9."}
messages: Any = [*QUESTION, asked.choices[0].message, result]
told = client.chat.completions.create(model="demo", messages=messages, tools=tools, temperature=0)
assert told.choices[0].message.content == ANSWER


class City(BaseModel):
    name: Literal["Rome", "Oslo"]
    is_large: bool


parsed = client.chat.completions.parse(model="demo", messages=QUESTION, response_format=City)
assert isinstance(parsed.choices[0].message.parsed, City)

# responses: whole, streamed, continued, in the background
response = client.responses.create(model="demo", input="Count from 7 to 9.", temperature=0)
assert response.output_text == ANSWER
with client.responses.stream(model="demo", input="Count from 7 to 9.", temperature=0) as events:
    assert "".join(e.delta for e in events if e.type == "response.output_text.delta") == ANSWER
    assert events.get_final_response().output_text == ANSWER
continued = client.responses.create(
    model="demo", input="Count from 3 to 5.", previous_response_id=response.id, temperature=0
)
assert continued.status == "completed" and len(client.responses.input_items.list(continued.id).data) >= 1
conversation = client.conversations.create(items=[{"role": "user", "content": "Hello."}])
for turn in ("Count from 7 to 9.", "Count from 3 to 5."):
    client.responses.create(model="demo", input=turn, conversation=conversation.id, temperature=0)
kept = [item.type for item in client.conversations.items.list(conversation.id, order="asc", limit=2)]
assert kept == ["message"] * 5 and client.conversations.delete(conversation.id).deleted
background = client.responses.create(
    model="demo", input="Count from 7 to 9.", background=True, service_tier="flex", temperature=0
)
while background.status in ("queued", "in_progress"):
    time.sleep(0.1)
    background = client.responses.retrieve(background.id)
assert background.output_text == ANSWER

# embeddings, which the client asks for as base64
one, other, again = client.embeddings.create(model="demo", input=["one", "other", "one"]).data
assert abs(sum(number**2 for number in one.embedding) - 1) < 1e-3
assert max(abs(a - b) for a, b in zip(one.embedding, again.embedding, strict=True)) < 1e-2
assert one.embedding != other.embedding

# a batch job
lines = [
    {
        "custom_id": f"line-{number}",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "demo", "messages": QUESTION, "temperature": 0},
    }
    for number in range(3)
]
content = io.BytesIO("\n".join(json.dumps(line) for line in lines).encode())
file = client.files.create(file=("in.jsonl", content), purpose="batch")
batch = client.batches.create(
    input_file_id=file.id,
    endpoint="/v1/chat/completions",
    completion_window="24h",
    output_expires_after={"anchor": "created_at", "seconds": 3600},
)
while batch.status not in ("completed", "failed", "expired", "cancelled"):
    time.sleep(0.1)
    batch = client.batches.retrieve(batch.id)
assert batch.request_counts and batch.request_counts.completed == 3, batch
assert batch.output_file_id
for line in client.files.content(batch.output_file_id).text.splitlines():
    assert json.loads(line)["response"]["body"]["choices"][0]["message"]["content"] == ANSWER
