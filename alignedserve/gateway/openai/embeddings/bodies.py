"""The bodies of embeddings, scores and rankings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from alignedserve.gateway.generation.body import FIRST_ERROR, MAX_SALT_CHARS
from alignedserve.gateway.generation.service import ServiceTier, Slo
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.openai.bodies import Prompt

# OpenAI's limit per call.
MAX_INPUTS = 2048

Texts = str | Annotated[list[str], Field(min_length=1, fail_fast=True)]


class EmbeddingBody(BodyFields):
    """The fields that embeddings, scores and rankings share."""

    refused: ClassVar[Mapping[str, str]] = {"truncate_prompt_tokens": ""}

    model: str | None = None
    service_tier: ServiceTier | None = None
    # The time to the first token is the time to the answer.
    slo: Slo | None = None
    # vLLM's fields.
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    add_special_tokens: bool = True
    # Accepted without effect.
    user: str | None = None


class EmbeddingsBody(EmbeddingBody):
    refused: ClassVar[Mapping[str, str]] = {**EmbeddingBody.refused, "messages": "; use input"}

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)


class ScoreBody(EmbeddingBody):
    """One text is compared with each of the others, or two lists pair by pair."""

    text_1: Texts
    text_2: Texts


class RerankBody(EmbeddingBody):
    query: str
    documents: Annotated[list[str], Field(min_length=1), FIRST_ERROR]
    # The number of results. 0 or null: one per document.
    top_n: Annotated[int, Field(ge=0)] | None = None
    return_documents: bool | None = None
