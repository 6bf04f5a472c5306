"""Makes calls for embeddings from valid bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignedserve.engine.validate import check_ids
from alignedserve.gateway.generation.prepared import packed
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.limits.limits import Limits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.embeddings.bodies import (
    MAX_INPUTS,
    EmbeddingBody,
    EmbeddingsBody,
    RerankBody,
    ScoreBody,
)
from alignedserve.gateway.openai.embeddings.prepared import (
    PreparedEmbeddings,
    PreparedRerank,
    PreparedScore,
)
from alignedserve.types import InvalidRequest

Input = str | list[int]


def embeddings(body: EmbeddingsBody, model: ServedModel, limits: Limits) -> PreparedEmbeddings:
    """Returns the call for embeddings. Raises ApiError and InvalidRequest."""
    most = model.embedding_size
    if body.dimensions is not None and most is not None and body.dimensions > most:
        raise InvalidRequest(
            f"dimensions={body.dimensions}: must be at most {most}, the model's embedding size"
        )
    return PreparedEmbeddings(
        **_fields(body, {"input": body.inputs}, model, limits),
        is_base64=body.encoding_format == "base64",
        dimensions=body.dimensions,
    )


def score(body: ScoreBody, model: ServedModel, limits: Limits) -> PreparedScore:
    """Returns the call for scores. Raises ApiError and InvalidRequest."""
    ones, others = _listed(body.text_1), _listed(body.text_2)
    if len(ones) not in (1, len(others)):
        message = f"{len(ones)} texts, for {len(others)} in text_2; must be one, or the same number"
        raise _wrong("text_1", message)
    fields = _fields(body, {"text_1": ones, "text_2": others}, model, limits)
    return PreparedScore(**fields, num_ones=len(ones))


def rerank(body: RerankBody, model: ServedModel, limits: Limits) -> PreparedRerank:
    """Returns the call for a ranking. Raises ApiError and InvalidRequest."""
    fields = _fields(body, {"query": [body.query], "documents": body.documents}, model, limits)
    shows_documents = body.return_documents is not False
    return PreparedRerank(
        **fields, num_results=body.top_n or 0, documents=body.documents if shows_documents else None
    )


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _wrong(name: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{name}: {message}", param=name, code=code)


def _fields(
    body: EmbeddingBody, inputs: dict[str, Sequence[Input]], model: ServedModel, limits: Limits
) -> dict[str, Any]:
    """Returns the fields that every prepared call has. `inputs` are by the body's parameter."""
    model.check_name(body.model)
    num_inputs = sum(map(len, inputs.values()))
    if num_inputs > MAX_INPUTS:
        name = next(reversed(inputs))
        raise _wrong(name, f"{num_inputs} inputs in all; at most {MAX_INPUTS} are allowed")
    prompts = [
        _checked(name, each, body.add_special_tokens, model, limits)
        for name, several in inputs.items()
        for each in several
    ]
    num_tokens = sum(map(len, prompts))
    if num_tokens > limits.max_call_tokens:
        name = next(reversed(inputs))
        raise _wrong(name, f"{num_tokens} tokens in all; at most {limits.max_call_tokens} are allowed")
    return {
        "prompts": [packed(prompt) for prompt in prompts],
        "service_tier": body.service_tier,
        "ttft_ms": body.slo.ttft_ms if body.slo else None,
        "cache_salt": body.cache_salt or "",
        "adapter": model.adapter_of(body.model),
    }


def _checked(
    name: str, given: Input, adds_special_tokens: bool, model: ServedModel, limits: Limits
) -> list[int]:
    """Returns the token ids of an input of this parameter."""
    prompt = model.prompt_ids(given, adds_special_tokens, name) if given else []
    if not prompt:
        raise _wrong(name, "must not be empty")
    most = min(model.max_model_len, limits.max_prompt_tokens or model.max_model_len)
    if len(prompt) > most:
        message = f"an input has {len(prompt)} tokens; at most {most} are allowed"
        raise _wrong(name, message, "context_length_exceeded")
    check_ids(name, prompt, model.vocabulary)
    return prompt
