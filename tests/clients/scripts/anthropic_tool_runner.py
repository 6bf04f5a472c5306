"""Anthropic's tool runner, plain and streamed: it sends broken calls back to the model, then calls a tool."""

import os
from typing import Any

import anthropic

client = anthropic.Anthropic(base_url=os.environ["BASE_URL"].removesuffix("/v1"), api_key="none")
QUESTION = {"role": "user", "content": "How warm is it in Rome?"}
ANSWER = "It is 21 degrees in Rome."


@anthropic.beta_tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "21 degrees"


def asked(**options: Any) -> Any:
    return client.beta.messages.tool_runner(
        model="demo", max_tokens=200, messages=[QUESTION], tools=[weather], **options
    )


REASONS = ["tool_use", "tool_use", "tool_use", "end_turn"]
turns = list(asked())
assert [turn.stop_reason for turn in turns] == REASONS
assert turns[-1].content[0].text == ANSWER

streams = [("".join(stream.text_stream), stream.get_final_message()) for stream in asked(stream=True)]
assert [turn.stop_reason for _, turn in streams] == REASONS
assert [text for text, _ in streams] == ["", "", "", ANSWER]
