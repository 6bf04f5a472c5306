"""How a client prescribes the form of the output: OpenAI's response_format, and vLLM's structured_outputs."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from alignedserve.structured_outputs import StructuredOutputsParams


class TextFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["text"]


class JsonObjectFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_object"]


class JsonSchema(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    # The output follows the schema in any case.
    strict: bool | None = None


class JsonSchemaFormat(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


class StructuredOutputs(BaseModel):
    """vLLM's. See StructuredOutputsParams."""

    model_config = ConfigDict(extra="forbid", strict=True)

    json_schema: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def structure_of_format(
    form: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
) -> StructuredOutputsParams | None:
    match form:
        case JsonSchemaFormat(json_schema=JsonSchema(json_schema=dict(schema))):
            return StructuredOutputsParams(json=schema)
        case JsonObjectFormat() | JsonSchemaFormat():
            return StructuredOutputsParams(json_object=True)
    return None
