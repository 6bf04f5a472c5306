"""LiteLLM: two turns with a tool each, as `openai/`, `hosted_vllm/` and `anthropic/`."""

import os
from typing import Any

import litellm

BASE_URL = os.environ["BASE_URL"]
QUESTIONS = ("How warm is it in Rome?", "And in Milan?")
ANSWER = "It is 21 degrees in Rome."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]

for model, base in (
    ("openai/demo", BASE_URL),
    ("hosted_vllm/demo", BASE_URL),
    ("anthropic/demo", BASE_URL.removesuffix("/v1")),
):
    at = {"model": model, "api_base": base, "api_key": "none", "tools": TOOLS, "max_tokens": 200}
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        asked = litellm.completion(messages=messages, **at).choices[0].message
        (call,) = asked.tool_calls
        assert call.function.name == "weather"
        messages += [asked, {"role": "tool", "tool_call_id": call.id, "content": "21 degrees"}]
        messages.append(litellm.completion(messages=messages, **at).choices[0].message)
        assert messages[-1].content == ANSWER
