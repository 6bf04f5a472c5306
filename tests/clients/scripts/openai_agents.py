"""openai-agents, through chats and through responses, plain and streamed: it sends broken calls back to the model,
then calls a tool."""

import asyncio
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    ToolCallOutputItem,
    function_tool,
)
from openai import AsyncOpenAI

QUESTION = "How warm is it in Rome?"
ANSWER = "It is 21 degrees in Rome."
CONFIG = RunConfig(tracing_disabled=True, tool_not_found_behavior="return_error_to_model")


@function_tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "21 degrees"


async def main() -> None:
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none")
    for model in (OpenAIChatCompletionsModel("demo", client), OpenAIResponsesModel("demo", client)):
        agent = Agent("guide", model=model, tools=[weather])
        done = await Runner.run(agent, QUESTION, run_config=CONFIG)
        streamed = Runner.run_streamed(agent, QUESTION, run_config=CONFIG)
        pieces = [
            event.data.delta
            async for event in streamed.stream_events()
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
        ]
        assert "".join(pieces) == ANSWER
        for run in (done, streamed):
            results = [item.output for item in run.new_items if isinstance(item, ToolCallOutputItem)]
            assert len(results) == 3 and results[-1] == "21 degrees"
            assert run.final_output == ANSWER


asyncio.run(main())
