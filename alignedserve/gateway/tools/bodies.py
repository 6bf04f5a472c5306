"""Tool calls: the tools of a client, how the output is constrained to them, and how calls are parsed from text.

A call that has to be made is a structured output: the arguments alone if the tool is named, else a list of calls. If
the model may choose, its text is parsed as its chat template writes calls (families.py). With a function that is
`strict`, or if there may be only one call, a grammar constrains it too, unless the client asks for another format.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from alignedserve.gateway.fields import Fields
from alignedserve.gateway.tools.calls import object_of
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest


class Function(Fields):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    # A JSON schema.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    type: Literal["function"]
    function: Function


class ChosenFunction(Fields):
    name: str


class ChosenTool(Fields):
    type: Literal["function"]
    function: ChosenFunction


class AllowedFunctions(Fields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, fail_fast=True)]


class AllowedTools(Fields):
    """OpenAI's: a choice among some of the tools. The model is not told of the others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions

    def of(self, tools: Sequence[Tool]) -> list[Tool]:
        """Raises InvalidRequest."""
        names = {each.function.name for each in self.allowed_tools.tools}
        if unknown := names - {tool.function.name for tool in tools}:
            raise InvalidRequest(f"tool_choice={min(unknown)!r}: is none of the tools")
        return [tool for tool in tools if tool.function.name in names]


Tools = Annotated[list[Tool], Field(min_length=1, fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


# ---- what the output has to look like ----


def structure_of(
    tools: Sequence[Tool], choice: ToolChoice, one_at_most: bool
) -> StructuredOutputsParams | None:
    """Returns None if the model may write what it likes. Raises InvalidRequest."""
    if isinstance(choice, ChosenTool):
        schemas = {tool.function.name: tool.function.parameters for tool in tools}
        name = choice.function.name
        if name not in schemas:
            raise InvalidRequest(f"tool_choice={name!r}: is none of the tools, {', '.join(schemas)}")
        return StructuredOutputsParams(json=schemas[name] or {"type": "object"})
    if choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = [_call_schema(tool.function, definitions) for tool in tools]
    most = {"maxItems": 1} if one_at_most else {}
    items = {"type": "array", "minItems": 1, "items": {"anyOf": calls}}
    return StructuredOutputsParams(json=items | most | ({"$defs": definitions} if definitions else {}))


def _call_schema(function: Function, definitions: dict[str, Any]) -> dict[str, Any]:
    parameters = dict(function.parameters or {"type": "object"})
    # References point to the whole schema's definitions.
    own = parameters.pop("$defs", {})
    for name, schema in own.items() if isinstance(own, dict) else ():
        if definitions.setdefault(name, schema) != schema:
            raise InvalidRequest(f"tools: two tools define {name!r} in $defs, and differently")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "parameters": parameters},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def readable(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Parses the arguments of calls: templates write them as JSON themselves, and clients send them back as text.

    A model may have been cut off, or have written no JSON, and its client sends that back. To refuse it would end the
    conversation for good, and templates take objects."""
    return [
        dict(message) | _with_objects(message.get("tool_calls")) | _with_thoughts(message)
        for message in messages
    ]


# The names of a turn's thoughts: some clients send one, and some templates read the other.
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
            return {**rest, "function": {**function, "arguments": object_of(text or "")}}
    return call
