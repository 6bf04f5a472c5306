"""What tools mean for a chat: to its template, to how the model is held, and to how its text is read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from alignedserve.gateway.model import ServedModel
from alignedserve.gateway.openai.bodies import ChatBody
from alignedserve.gateway.tools.bodies import ChosenTool
from alignedserve.gateway.tools.families import family_of
from alignedserve.gateway.tools.readers import HERMES_OPEN, JsonReader, NamedReader
from alignedserve.structured_outputs import StructuredOutputsParams


@dataclass(frozen=True)
class Tooling:
    # variables for the chat template
    variables: dict[str, Any] = field(default_factory=dict)
    # what finds calls in the text: a kind of reader (tools/readers.py), and the tool where only one can be called
    reader: str | None = None
    tool_name: str = ""
    # the grammar where the model may call or not, and the client asks for no other format
    structure: StructuredOutputsParams | None = None
    # True: a tag around calls is a token that would be left out of the text
    shows_special_tokens: bool = False


def tooling_of(body: ChatBody, model: ServedModel) -> Tooling:
    """Raises ApiError and InvalidRequest where this model makes no calls."""
    tools = body.called_tools
    if not tools:
        return Tooling()
    template = model.tool_template
    variables = {"tools": [tool.model_dump(exclude_none=True) for tool in tools]}
    if isinstance(body.tool_choice, ChosenTool):
        return Tooling(variables, NamedReader.kind, body.tool_choice.function.name)
    if body.tool_choice == "required":
        return Tooling(variables, JsonReader.kind)
    is_special = model.is_special(HERMES_OPEN)
    family = family_of(template, is_special)
    structure = family.structure(tools, body.parallel_tool_calls is False)
    return Tooling(variables, family.reader.kind, "", structure, is_special)
