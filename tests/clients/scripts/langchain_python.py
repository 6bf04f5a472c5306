"""LangChain: chats, streams, tools and structured outputs, through chats and through responses."""

import os
from typing import Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "Count from 7 to 9."
ANSWER = "7, 8, 9"


@tool  # type: ignore[untyped-decorator]
def weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city."""
    return QUESTION


class City(BaseModel):
    """A city."""

    name: Literal["Rome", "Oslo"]


for uses_responses in (False, True):
    model = ChatOpenAI(
        base_url=os.environ["BASE_URL"],
        api_key="none",
        model="demo",
        temperature=0,
        use_responses_api=uses_responses,
    )
    assert model.invoke(QUESTION).text == ANSWER
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == ANSWER
    assert [each.text for each in model.batch([QUESTION, QUESTION])] == [ANSWER, ANSWER]

    asked = model.bind_tools([weather], tool_choice="weather", strict=True).invoke(QUESTION)
    call = asked.tool_calls[0]
    assert call["args"]["city"] in ("Rome", "Oslo")
    result = ToolMessage(weather.invoke(call["args"]), tool_call_id=call["id"])
    assert model.bind_tools([weather]).invoke([HumanMessage(QUESTION), asked, result]).text == ANSWER

    assert isinstance(model.with_structured_output(City, method="json_schema").invoke(QUESTION), City)
    assert isinstance(
        model.with_structured_output(City, method="function_calling", strict=True).invoke(QUESTION), City
    )
