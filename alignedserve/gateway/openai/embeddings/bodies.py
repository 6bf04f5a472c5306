"""The bodies of embeddings, scores and rankings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from alignedserve.gateway.generation.body import FIRST_ERROR, MAX_SALT_CHARS, Slo
from alignedserve.gateway.generation.call import ServiceTier
from alignedserve.gateway.http.fields import BodyFields
from alignedserve.gateway.openai.bodies import Messages, Prompt

# OpenAI's limit per call.
MAX_INPUTS = 2048

Texts = str | Annotated[list[str], Field(min_length=1, fail_fast=True)]


def _checked_number(number: int) -> int:
    if number < -1 or number == 0:
        raise PydanticCustomError("truncate_prompt_tokens", "must be -1 or at least 1")
    return number


class EmbeddingBody(BodyFields):
    """The fields that embeddings, scores and rankings share."""

    model: str | None = None
    service_tier: ServiceTier | None = None
    # The time to the first token is the time to the answer.
    slo: Slo | None = None
    # vLLM's fields.
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    # The default is true for texts. A chat template writes its own special tokens.
    add_special_tokens: bool | None = None
    # vLLM's field: each input is cut to its last tokens, this many; -1: as many as the model can read.
    truncate_prompt_tokens: Annotated[int, AfterValidator(_checked_number)] | None = None
    # Accepted without effect.
    user: str | None = None


class EmbeddingsBody(EmbeddingBody):
    refused: ClassVar[Mapping[str, str]] = {"chat_template": ": the model's own is used"}

    # Exactly one of these two is given. The second one is vLLM's: the model's chat template makes one input of it.
    input: Prompt | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None

    @property
    def inputs(self) -> list[str | list[int]]:
        if self.input is None:
            return []
        if isinstance(self.input, str):
            return [self.input]
        if isinstance(self.input[0], int):
            return [self.input]
        return list(self.input)


class PoolingBody(EmbeddingsBody):
    """vLLM's. An embedding is what can be pooled of a model here."""

    refused: ClassVar[Mapping[str, str]] = {**EmbeddingsBody.refused, "softmax": "", "activation": ""}

    task: Literal["embed"] | None = None
    # False would ask for vectors of other lengths than 1.
    normalize: Literal[True] | None = None
    use_activation: Literal[True] | None = None


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
