"""Calls for embeddings, and the answer that each kind makes of the vectors."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from alignedserve.gateway.generation.prepared import PreparedCall
from alignedserve.gateway.generation.request_builder import RequestBuilder, salt_of, unpacked
from alignedserve.gateway.generation.service import Service
from alignedserve.gateway.http.json_pieces import Piece, array_of, encode, object_of
from alignedserve.gateway.openai.embeddings.embedding import Embedding
from alignedserve.protocol.pooling import DTYPE

# An embedding as it arrives from the router: see protocol/pooling.py.
Vector = bytes


class PreparedEmbedding(PreparedCall, frozen=True, kw_only=True):
    async def whole(
        self, request_builder: RequestBuilder, service: Service, owner: str
    ) -> tuple[Iterable[Piece], Mapping[str, Any]]:
        prompts = [await unpacked(prompt) for prompt in self.prompts]
        embedding = Embedding(
            request_builder.islands,
            prompts,
            request_builder.embedding_pooling,
            service,
            salt_of(owner, self.cache_salt),
            self.adapter,
            owner,
        )
        try:
            vectors = await embedding.vectors()
        finally:
            embedding.close()
        num_tokens = sum(map(len, prompts))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        name = request_builder.model.answering_as(self.adapter).name
        return self.pieces(vectors, name, usage), usage

    def pieces(self, vectors: Sequence[Vector], model: str, usage: Mapping[str, int]) -> Iterator[Piece]:
        """Returns the answer. `model` is the model's name."""
        raise NotImplementedError


class PreparedEmbeddings(PreparedEmbedding, frozen=True, kw_only=True):
    is_base64: bool
    dimensions: int | None

    def pieces(self, vectors: Sequence[Vector], model: str, usage: Mapping[str, int]) -> Iterator[Piece]:
        data = array_of([self._item(index, vector)] for index, vector in enumerate(vectors))
        return object_of({"object": "list", "model": model, "usage": usage}, {"data": data})

    def _item(self, index: int, vector: Vector) -> bytes:
        shown = vector if self.dimensions is None else _shortened(vector, self.dimensions)
        embedding = base64.b64encode(shown).decode() if self.is_base64 else _numbers(shown).tolist()
        return encode({"object": "embedding", "index": index, "embedding": embedding})


class PreparedScore(PreparedEmbedding, frozen=True, kw_only=True):
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


class PreparedRerank(PreparedEmbedding, frozen=True, kw_only=True):
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
