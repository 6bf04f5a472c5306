"""The output formats that a client may ask for in OpenAI's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from alignedserve.gateway.http.fields import Fields
from alignedserve.structured_outputs import StructuredOutputsParams


class TextFormat(Fields):
    type: Literal["text"]


class JsonObjectFormat(Fields):
    type: Literal["json_object"]


class JsonSchema(Fields):
    name: str
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    # Without effect: the output follows the schema in any case.
    strict: bool | None = None


class JsonSchemaFormat(Fields):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat = Annotated[TextFormat | JsonObjectFormat | JsonSchemaFormat, Field(discriminator="type")]


def structure_of_format(
    form: TextFormat | JsonObjectFormat | JsonSchemaFormat | None,
) -> StructuredOutputsParams | None:
    match form:
        case JsonSchemaFormat(json_schema=JsonSchema(json_schema=dict(schema))):
            return StructuredOutputsParams(json=schema)
        case JsonObjectFormat() | JsonSchemaFormat():
            return StructuredOutputsParams(json_object=True)
    return None
