"""pydantic-ai, through chats and through responses, plain and streamed: it sends broken calls back to the model,
then calls a tool."""

import asyncio
import os

from pydantic_ai import Agent, ToolReturnPart
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "How warm is it in Rome?"
ANSWER = "It is 21 degrees in Rome."


def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "21 degrees"


async def main() -> None:
    provider = OpenAIProvider(base_url=os.environ["BASE_URL"], api_key="none")
    for api in (OpenAIChatModel, OpenAIResponsesModel):
        agent = Agent(api("demo", provider=provider), tools=[weather])
        done = await agent.run(QUESTION)
        assert done.output == ANSWER
        async with agent.run_stream(QUESTION) as streamed:
            assert "".join([text async for text in streamed.stream_text(delta=True)]) == ANSWER
        for run in (done, streamed):
            parts = [part for message in run.all_messages() for part in message.parts]
            assert [part.content for part in parts if isinstance(part, ToolReturnPart)] == ["21 degrees"]


asyncio.run(main())
