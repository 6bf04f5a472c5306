"""The tools and the tool choice of a request, and how they constrain the output.

A forced call is a structured output: the arguments if the tool is named, and a list of calls otherwise. If the model
may choose, its text is parsed by the format of its chat template (reading.py). A grammar constrains it too if a
function is `strict` or at most one call is allowed, unless the client asks for another format.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field
from pydantic import Tag as PydanticTag

from alignedserve.gateway.http.fields import BodyFields
from alignedserve.structured_outputs import StructuredOutputsParams
from alignedserve.types import InvalidRequest


class Function(BodyFields):
    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    # A JSON schema.
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(BodyFields):
    type: Literal["function"]
    function: Function


class ChosenFunction(BodyFields):
    name: str


class ChosenTool(BodyFields):
    type: Literal["function"]
    function: ChosenFunction


class AllowedFunctions(BodyFields):
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, fail_fast=True)]


class AllowedTools(BodyFields):
    """OpenAI's field: a choice among some of the tools. The prompt omits the others."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions

    def of(self, tools: Sequence[Tool]) -> list[Tool]:
        """Returns the allowed tools. Raises InvalidRequest."""
        return allowed(tools, {each.function.name for each in self.allowed_tools.tools})


def allowed(tools: Sequence[Tool], names: Set[str]) -> list[Tool]:
    """Returns the tools with these names. Raises InvalidRequest."""
    if unknown := names - {tool.function.name for tool in tools}:
        raise InvalidRequest(f"tool_choice={min(unknown)!r}: is none of the tools")
    return [tool for tool in tools if tool.function.name in names]


Tools = Annotated[list[Tool], Field(fail_fast=True)]
ToolChoice = Literal["none", "auto", "required"] | ChosenTool


def _kind_of(choice: Any) -> str | None:
    if isinstance(choice, str):
        return "mode" if choice in ("none", "auto", "required") else None
    kind = choice.get("type") if isinstance(choice, dict) else getattr(choice, "type", None)
    return kind if kind in ("function", "allowed_tools") else None


# Discriminated by type, so that an error is only about the type that was sent.
AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], PydanticTag("mode")]
    | Annotated[ChosenTool, PydanticTag("function")]
    | Annotated[AllowedTools, PydanticTag("allowed_tools")],
    Discriminator(
        _kind_of,
        custom_error_type="tool_choice",
        custom_error_message="must be none, auto, required, a function by name, or allowed_tools",
    ),
]


def offered(
    tools: Sequence[Tool] | None, choice: ToolChoice | AllowedTools | None
) -> tuple[Sequence[Tool], ToolChoice]:
    """Returns the tools that the prompt describes, and the choice among them. Raises InvalidRequest."""
    if not tools:
        # Agents without tools send an empty list.
        if choice not in (None, "none") and (tools is None or choice != "auto"):
            raise InvalidRequest("tool_choice: there are no tools")
        return [], "auto"
    if isinstance(choice, AllowedTools):
        return choice.of(tools), choice.allowed_tools.mode
    return [] if choice == "none" else tools, choice or "auto"


# ---- constraints on the output ----


def structure_of(
    tools: Sequence[Tool], choice: ToolChoice, one_at_most: bool
) -> StructuredOutputsParams | None:
    """Returns None if the output is not constrained. Raises InvalidRequest."""
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
    # References point to the definitions of the whole schema.
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
