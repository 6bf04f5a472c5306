"""Calls for embeddings, made from valid bodies, and the answer that each kind makes of the vectors."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
from msgspec.structs import replace

from alignedserve.engine.request import check_ids
from alignedserve.gateway.generation.call import AnswerSpec, Call, CallRunner, Spec, packed, unpacked
from alignedserve.gateway.generation.chat import readable, template_variables
from alignedserve.gateway.http.errors import ApiError
from alignedserve.gateway.http.json_pieces import Piece, array_of, encode, object_of
from alignedserve.gateway.limits.limits import CallLimits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.gateway.openai.embeddings.bodies import (
    MAX_INPUTS,
    EmbeddingBody,
    EmbeddingsBody,
    PoolingBody,
    RerankBody,
    ScoreBody,
)
from alignedserve.gateway.openai.embeddings.embedding import Embedding
from alignedserve.protocol.messages import Request
from alignedserve.protocol.pooling import DTYPE, NO_SAMPLING, POOLINGS
from alignedserve.types import InvalidRequest, RequestKey

# An embedding as it arrives from the router: see protocol/pooling.py.
Vector = bytes


class VectorSpec(AnswerSpec, frozen=True, kw_only=True):
    async def whole(self, call: Call[Any], runner: CallRunner) -> tuple[Iterable[Piece], Mapping[str, Any]]:
        prompts = [await unpacked(prompt) for prompt in call.prompts]
        call = replace(call, request=replace(call.request, pooling=runner.embedding_pooling))
        embedding = Embedding(call, runner.islands, prompts)
        try:
            vectors = await embedding.vectors()
        finally:
            embedding.close()
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        name = runner.model.answering_as(call.request.adapter).name
        return self.pieces(vectors, name, usage), usage

    def pieces(self, vectors: Sequence[Vector], model: str, usage: Mapping[str, int]) -> Iterator[Piece]:
        """Returns the answer. `model` is the model's name."""
        raise NotImplementedError


class EmbeddingsSpec(VectorSpec, frozen=True, kw_only=True):
    is_base64: bool
    dimensions: int | None

    def pieces(self, vectors: Sequence[Vector], model: str, usage: Mapping[str, int]) -> Iterator[Piece]:
        data = array_of([self._item(index, vector)] for index, vector in enumerate(vectors))
        return object_of({"object": "list", "model": model, "usage": usage}, {"data": data})

    def _item(self, index: int, vector: Vector) -> bytes:
        return encode({"object": "embedding", "index": index, "embedding": self._shown(vector)})

    def _shown(self, vector: Vector) -> str | list[float]:
        shown = vector if self.dimensions is None else _shortened(vector, self.dimensions)
        if self.is_base64:
            return base64.b64encode(shown).decode()
        numbers: list[float] = _numbers(shown).tolist()
        return numbers


class PoolingSpec(EmbeddingsSpec, frozen=True, kw_only=True):
    def pieces(self, vectors: Sequence[Vector], model: str, usage: Mapping[str, int]) -> Iterator[Piece]:
        data = array_of([self._item(index, vector)] for index, vector in enumerate(vectors))
        body = {"id": f"pool-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        return object_of(body | {"model": model, "usage": usage}, {"data": data})

    def _item(self, index: int, vector: Vector) -> bytes:
        return encode({"object": "pooling", "index": index, "data": self._shown(vector)})


class ScoreSpec(VectorSpec, frozen=True, kw_only=True):
    # The number of texts with which the others are compared. They come first among the prompts.
    num_ones: int

    def pieces(self, vectors: Sequence[Vector], model: str, usage: Mapping[str, int]) -> Iterator[Piece]:
        ones, others = vectors[: self.num_ones], vectors[self.num_ones :]
        body = {"id": f"score-{secrets.token_hex(12)}", "object": "list", "created": int(time.time())}
        data = [
            {"index": index, "object": "score", "score": similarity(ones[index % len(ones)], other)}
            for index, other in enumerate(others)
        ]
        yield encode(body | {"model": model, "data": data, "usage": usage})


class RerankSpec(VectorSpec, frozen=True, kw_only=True):
    # 0: one per document.
    num_results: int
    # None: they are not shown.
    documents: list[str] | None

    def pieces(self, vectors: Sequence[Vector], model: str, usage: Mapping[str, int]) -> Iterator[Piece]:
        scores = [similarity(vectors[0], other) for other in vectors[1:]]
        # Equally relevant documents keep their order.
        in_order = sorted(range(len(scores)), key=lambda index: -scores[index])
        body = {"id": f"rerank-{secrets.token_hex(12)}", "model": model, "usage": usage}
        shown = in_order[: self.num_results or None]
        return object_of(body, {"results": array_of([self._result(i, scores[i])] for i in shown)})

    def _result(self, index: int, score: float) -> bytes:
        result: dict[str, Any] = {"index": index, "relevance_score": score}
        if self.documents is not None:
            result["document"] = {"text": self.documents[index]}
        return encode(result)


def similarity(one: Vector, other: Vector) -> float:
    """Returns the cosine of the angle between two vectors of length 1."""
    cosine = np.dot(_numbers(one).astype(np.float64), _numbers(other).astype(np.float64))
    return float(np.clip(cosine, -1.0, 1.0))


def _shortened(vector: Vector, num_dimensions: int) -> Vector:
    """Returns the first `num_dimensions` numbers, scaled to length 1."""
    numbers = _numbers(vector)[:num_dimensions].astype(np.float64)
    length = np.linalg.norm(numbers)
    return (numbers / length if length else numbers).astype(DTYPE).tobytes()


def _numbers(vector: Vector) -> np.ndarray:
    return np.frombuffer(vector, DTYPE)


Input = str | list[int]
Embeddings = TypeVar("Embeddings", bound=EmbeddingsSpec)


def embeddings(body: EmbeddingsBody, model: ServedModel, limits: CallLimits) -> Call[EmbeddingsSpec]:
    """Returns the call for embeddings. Raises ApiError and InvalidRequest."""
    return _vectors(body, model, limits, EmbeddingsSpec)


def pooling(body: PoolingBody, model: ServedModel, limits: CallLimits) -> Call[PoolingSpec]:
    """Returns the call for pooled states. Raises ApiError and InvalidRequest."""
    return _vectors(body, model, limits, PoolingSpec)


def classify(body: EmbeddingsBody, model: ServedModel, limits: CallLimits) -> Call[EmbeddingsSpec]:
    """Raises ApiError: no model of the supported architectures has classes."""
    model.check_name(body.model)
    raise ApiError(400, "the model has no classification head", param="model")


def _vectors(
    body: EmbeddingsBody, model: ServedModel, limits: CallLimits, kind: type[Embeddings]
) -> Call[Embeddings]:
    most = model.embedding_size
    if body.dimensions is not None and most is not None and body.dimensions > most:
        raise InvalidRequest(
            f"dimensions={body.dimensions}: must be at most {most}, the model's embedding size"
        )
    if (body.input is None) == (body.messages is None):
        raise _wrong("input", "exactly one of input and messages must be given")
    inputs: dict[str, Sequence[Input]] = {"input": body.inputs}
    if body.messages is not None:
        inputs = {"messages": [_chat_ids(body, body.messages, model)]}
    spec = kind(is_base64=body.encoding_format == "base64", dimensions=body.dimensions)
    return _call(body, inputs, model, limits, spec)


def _chat_ids(body: EmbeddingsBody, messages: Sequence[dict[str, Any]], model: ServedModel) -> list[int]:
    variables = {
        "add_generation_prompt": body.add_generation_prompt,
        **template_variables(body.chat_template_kwargs, None),
    }
    is_bounded = body.truncate_prompt_tokens is None
    return model.chat_ids(readable(messages), variables, bool(body.add_special_tokens), is_bounded)


def score(body: ScoreBody, model: ServedModel, limits: CallLimits) -> Call[ScoreSpec]:
    """Returns the call for scores. Raises ApiError and InvalidRequest."""
    ones, others = _listed(body.text_1), _listed(body.text_2)
    if len(ones) not in (1, len(others)):
        message = f"{len(ones)} texts, for {len(others)} in text_2; must be one, or the same number"
        raise _wrong("text_1", message)
    return _call(body, {"text_1": ones, "text_2": others}, model, limits, ScoreSpec(num_ones=len(ones)))


def rerank(body: RerankBody, model: ServedModel, limits: CallLimits) -> Call[RerankSpec]:
    """Returns the call for a ranking. Raises ApiError and InvalidRequest."""
    documents = None if body.return_documents is False else body.documents
    spec = RerankSpec(num_results=body.top_n or 0, documents=documents)
    return _call(body, {"query": [body.query], "documents": body.documents}, model, limits, spec)


def _listed(texts: str | list[str]) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _wrong(name: str, message: str, code: str | None = None) -> ApiError:
    return ApiError(400, f"{name}: {message}", param=name, code=code)


def _call(
    body: EmbeddingBody,
    inputs: dict[str, Sequence[Input]],
    model: ServedModel,
    limits: CallLimits,
    spec: Spec,
) -> Call[Spec]:
    """`inputs` are by the body's parameter."""
    model.check_name(body.model)
    num_inputs = sum(map(len, inputs.values()))
    if num_inputs > MAX_INPUTS:
        name = next(reversed(inputs))
        raise _wrong(name, f"{num_inputs} inputs in all; at most {MAX_INPUTS} are allowed")
    prompts = [
        _checked(name, each, body, model, limits) for name, several in inputs.items() for each in several
    ]
    num_tokens = sum(map(len, prompts))
    if num_tokens > limits.max_call_tokens:
        name = next(reversed(inputs))
        raise _wrong(name, f"{num_tokens} tokens in all; at most {limits.max_call_tokens} are allowed")
    return Call(
        request=Request(
            key=RequestKey(0),
            prompt=[],
            params=NO_SAMPLING,
            seed=0,
            arrival_s=0.0,
            cache_salt=body.cache_salt or "",
            # The gateway fills it in.
            pooling=POOLINGS[0],
            adapter=model.adapter_of(body.model),
        ),
        prompts=[packed(prompt) for prompt in prompts],
        spec=spec,
        service_tier=body.service_tier,
        ttft_ms=body.slo.ttft_ms if body.slo else None,
    )


def _checked(
    name: str, given: Input, body: EmbeddingBody, model: ServedModel, limits: CallLimits
) -> list[int]:
    """Returns the token ids of an input of this parameter."""
    adds_special_tokens, kept = body.add_special_tokens is not False, body.truncate_prompt_tokens
    prompt = model.prompt_ids(given, adds_special_tokens, name, kept is None) if given else []
    if not prompt:
        raise _wrong(name, "must not be empty")
    most = min(model.max_model_len, limits.max_prompt_tokens or model.max_model_len)
    if kept is not None:
        prompt = prompt[-(most if kept < 0 else kept) :]
    if len(prompt) > most:
        message = f"an input has {len(prompt)} tokens; at most {most} are allowed"
        raise _wrong(name, message, "context_length_exceeded")
    check_ids(name, prompt, model.vocabulary)
    return prompt
