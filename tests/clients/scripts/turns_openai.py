"""OpenAI's client for Python: two turns with a tool each, through chats (whole and streamed) and through responses
(by id, and with all items sent again)."""

import os
from typing import Any

import openai

client = openai.OpenAI(base_url=os.environ["BASE_URL"], api_key="none")
QUESTIONS = ("How warm is it in Rome?", "And in Milan?")
ANSWER = "It is 21 degrees in Rome."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
FLAT_TOOLS: Any = [{"type": "function"} | FUNCTION]


def whole(messages: Any) -> Any:
    return client.chat.completions.create(model="demo", messages=messages, tools=TOOLS).choices[0].message


def streamed(messages: Any) -> Any:
    with client.chat.completions.stream(model="demo", messages=messages, tools=TOOLS) as stream:
        return stream.get_final_completion().choices[0].message


for answer in (whole, streamed):
    messages: Any = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        asked = answer(messages)
        (call,) = asked.tool_calls
        assert call.function.name == "weather" and call.function.arguments == '{"city": "Rome"}'
        messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
        messages.append(answer(messages))
        assert messages[-1].content == ANSWER


def result_of(response: Any) -> Any:
    (call,) = [item for item in response.output if item.type == "function_call"]
    return {"type": "function_call_output", "call_id": call.call_id, "output": "21 degrees"}


last: Any = None
for question in QUESTIONS:
    asked = client.responses.create(
        model="demo", input=question, tools=FLAT_TOOLS, previous_response_id=last and last.id
    )
    last = client.responses.create(
        model="demo", input=[result_of(asked)], tools=FLAT_TOOLS, previous_response_id=asked.id
    )
    assert last.output_text == ANSWER

items: Any = []
for question in QUESTIONS:
    items.append({"role": "user", "content": question})
    asked = client.responses.create(model="demo", input=items, tools=FLAT_TOOLS, store=False)
    items += [*asked.output, result_of(asked)]
    last = client.responses.create(model="demo", input=items, tools=FLAT_TOOLS, store=False)
    assert last.output_text == ANSWER
    items += last.output
