"""LangChain: two turns with a tool each, through chats, through responses, and through responses by id."""

import os

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

QUESTIONS = ("How warm is it in Rome?", "And in Milan?")
ANSWER = "It is 21 degrees in Rome."


@tool  # type: ignore[untyped-decorator]
def weather(city: str) -> str:
    """The weather of a city."""
    assert city == "Rome"
    return "21 degrees"


for options in (
    {"use_responses_api": False},
    {"use_responses_api": True},
    {"use_responses_api": True, "use_previous_response_id": True},
):
    server = ChatOpenAI(base_url=os.environ["BASE_URL"], api_key="none", model="demo", **options)
    model = server.bind_tools([weather])
    messages = []
    for question in QUESTIONS:
        messages.append(HumanMessage(question))
        asked = model.invoke(messages)
        (call,) = asked.tool_calls
        messages += [asked, ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])]
        messages.append(model.invoke(messages))
        assert messages[-1].text == ANSWER
