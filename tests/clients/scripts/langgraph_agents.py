"""langgraph's prebuilt agent, through chats and responses, plain and streamed.

It sends a call to a tool that does not exist back to the model. A call with arguments that are not JSON ends a run, and
is in the next run's history.
"""

import os

from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

QUESTION = ("user", "How warm is it in Rome?")
ANSWER = "It is 21 degrees in Rome."


def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "21 degrees"


for uses_responses in (False, True):
    model = ChatOpenAI(
        base_url=os.environ["BASE_URL"], api_key="none", model="demo", use_responses_api=uses_responses
    )
    agent = create_react_agent(model, [weather])
    history = agent.invoke({"messages": [QUESTION]})["messages"]
    assert [message.type for message in history] == ["human", "ai", "tool", "ai"]
    assert history[-1].invalid_tool_calls[0]["name"] == "weather"

    asked = {"messages": [*history, QUESTION]}
    pieces = []
    for mode, event in agent.stream(asked, stream_mode=["messages", "values"]):
        if mode == "values":
            history = event["messages"]
        elif event[0].type == "AIMessageChunk":
            pieces.append(event[0].text)
    assert "".join(pieces) == ANSWER
    assert [message.text for message in history[-2:]] == ["21 degrees", ANSWER]
