"""Turns prompts into vectors of length 1. Similar prompts have similar vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from alignedserve.lengths.config import ENCODERS
from alignedserve.lengths.prediction import Vector

# Turns token ids into text, without special tokens.
Decode = Callable[[Sequence[int]], str]


class Encoder(ABC):
    # Vectors of two encoders with the same name are comparable.
    name: str
    dim: int
    # Prompts with a lower similarity (the product of their vectors) do not predict each other.
    threshold: float

    @abstractmethod
    def encode(self, prompt: Sequence[int]) -> Vector:
        """Returns the same vector for the same prompt. Its cost is bounded for prompts of any length."""


def make_encoder(kind: str, model: str | None = None, decode: Decode | None = None) -> Encoder:
    """`model`: a sentence-embedding model, a directory or a name. `decode` belongs to the prompts' tokenizer. Raises
    ValueError for an encoder that can't be made."""
    if kind == "hash":
        from alignedserve.lengths.hash_encoder import HashEncoder

        return HashEncoder()
    if kind == "sentence":
        from alignedserve.lengths.sentence_encoder import SentenceEncoder

        if decode is None:
            raise ValueError("length_predictor='sentence': needs text, but this model has no tokenizer")
        return SentenceEncoder.load(model, decode)
    raise ValueError(f"length_predictor={kind!r}: must be one of {', '.join(ENCODERS)}")
