"""A chat after parsing, in one form for all APIs, and the input that its template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.tools.bodies import Tool, ToolChoice
from alignedserve.gateway.tools.calls import arguments_of
from alignedserve.types import InvalidRequest


@dataclass(frozen=True)
class Conversation:
    # In the form of OpenAI's chat completions, which templates expect.
    messages: Sequence[dict[str, Any]]
    # The tools that the model may call.
    tools: Sequence[Tool] = ()
    choice: ToolChoice = "auto"
    one_call_at_most: bool = False
    # Reasoning effort, if the template supports it. "none": no reasoning.
    effort: str | None = None


class AnyChatBody(GenerationBody):
    """The fields of all chat bodies, in addition to those of all calls."""

    chat_template_kwargs: dict[str, Any] | None = None
    # vLLM's field: false removes reasoning from the answer. SGLang's field: false leaves reasoning in the content.
    include_reasoning: bool | None = None
    separate_reasoning: bool | None = None
    # vLLM's field: false if the answer continues the last message.
    add_generation_prompt: bool | None = None

    def template_variables(self, effort: str | None) -> dict[str, Any]:
        found: dict[str, Any] = {}
        if self.add_generation_prompt is not None:
            found["add_generation_prompt"] = self.add_generation_prompt
        return found | template_variables(self.chat_template_kwargs, effort)


# The renderer sets these itself; variables of the same names would replace them.
_NOT_VARIABLES = ("chat_template", "documents", "messages", "self", "tokenize", "tools")


def template_variables(given: dict[str, Any] | None, effort: str | None) -> dict[str, Any]:
    """Returns a chat template's variables, such as Qwen3's enable_thinking. Raises InvalidRequest."""
    for name in _NOT_VARIABLES:
        if given and name in given:
            raise InvalidRequest(f"chat_template_kwargs: {name} is not a variable of a template")
    found: dict[str, Any] = {}
    if effort is not None:
        # Some templates have levels, others a switch.
        found["reasoning_effort"] = effort
        found["enable_thinking"] = found["thinking"] = effort != "none"
    return found | (given or {})


def tool_variables(tools: Sequence[Tool], model: ServedModel) -> dict[str, Any]:
    """Returns the template variables that describe the tools."""
    if not tools:
        return {}
    found = [tool.model_dump(exclude_none=True) for tool in tools]
    if model.writes_harmony(has_tools=True):
        for tool in found:
            # The template requires a description.
            tool["function"].setdefault("description", "")
    return {"tools": found}


def readable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with parsed arguments of calls. Templates take objects and write the JSON themselves;
    clients send text.

    Text that is no JSON is kept in an object: the model may have been cut off, and refusing it would end the
    conversation."""
    return [
        dict(message) | _with_objects(message.get("tool_calls")) | _with_thoughts(message)
        for message in messages
    ]


# Names of a turn's reasoning. Some clients send one, and some templates read the other.
_THOUGHTS = ("reasoning_content", "reasoning")


def _with_thoughts(message: Mapping[str, Any]) -> dict[str, Any]:
    found = (message.get(name) for name in _THOUGHTS)
    text = next((each for each in found if each and isinstance(each, str)), None)
    return {} if text is None else dict.fromkeys(_THOUGHTS, text)


def _with_objects(calls: Any) -> dict[str, Any]:
    if not isinstance(calls, list):
        return {}
    return {"tool_calls": [_with_object(call) for call in calls]}


def _with_object(call: Any) -> Any:
    match call:
        case {"function": {"arguments": str() | None as text, **function}, **rest}:
            return {**rest, "function": {**function, "arguments": arguments_of(text or "")}}
    return call
