"""openai-agents with conversations stored on the server.

They are used through a session, which adds and reads items itself, and through `conversation_id`, where responses do.
"""

import asyncio
import os

from agents import Agent, OpenAIConversationsSession, OpenAIResponsesModel, RunConfig, Runner, function_tool
from openai import AsyncOpenAI, NotFoundError

QUESTION = "How warm is it in Rome?"
AGAIN = "And in Milan?"
ANSWER = "It is 21 degrees in Rome."
CONFIG = RunConfig(tracing_disabled=True)
TURN = ["message", "function_call", "function_call_output", "message"]


@function_tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "21 degrees"


async def main() -> None:
    client = AsyncOpenAI(base_url=os.environ["BASE_URL"], api_key="none")
    agent = Agent("guide", model=OpenAIResponsesModel("demo", client), tools=[weather])

    session = OpenAIConversationsSession(openai_client=client)
    for question in (QUESTION, AGAIN):
        done = await Runner.run(agent, question, session=session, run_config=CONFIG)
        assert done.final_output == ANSWER
    items = await session.get_items()
    assert [item["type"] for item in items] == 2 * TURN, items
    assert [item["type"] for item in await session.get_items(limit=3)] == TURN[1:]
    last = await session.pop_item()
    assert last == items[-1] and await session.get_items() == items[:-1]
    many = [{"role": "user", "content": f"Question {number}"} for number in range(45)]
    await session.add_items(many)
    texts = [item["content"][0]["text"] for item in await session.get_items(limit=45)]
    assert texts == [item["content"] for item in many]
    name = session.session_id
    await session.clear_session()
    try:
        await client.conversations.retrieve(name)
        raise AssertionError(f"{name} is still there")
    except NotFoundError:
        pass

    conversation = await client.conversations.create()
    for question in (QUESTION, AGAIN):
        done = await Runner.run(agent, question, conversation_id=conversation.id, run_config=CONFIG)
        assert done.final_output == ANSWER
    kept = [item async for item in client.conversations.items.list(conversation.id, order="asc")]
    assert [item.type for item in kept] == 2 * TURN, kept


asyncio.run(main())
