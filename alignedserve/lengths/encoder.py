"""A prompt as a vector of length 1: similar prompts have similar vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from alignedserve.lengths.config import ENCODERS
from alignedserve.lengths.prediction import Vector

# Makes text of token ids, without special tokens.
Decode = Callable[[Sequence[int]], str]


class Encoder(ABC):
    # Vectors of two encoders with the same name can be compared.
    name: str
    dim: int
    # Prompts whose similarity (the product of their vectors) is less say nothing about each other.
    threshold: float

    @abstractmethod
    def encode(self, prompt: Sequence[int]) -> Vector:
        """Returns the same vector for the same prompt. Its cost has a bound, however long the prompt is."""


def make_encoder(kind: str, model: str | None = None, decode: Decode | None = None) -> Encoder:
    """`model` is a sentence-embedding model, a directory or a name; `decode` is that of the tokenizer of the prompts.
    Raises ValueError for an encoder that can't be made."""
    if kind == "hash":
        from alignedserve.lengths.hash_encoder import HashEncoder

        return HashEncoder()
    if kind == "sentence":
        from alignedserve.lengths.sentence_encoder import SentenceEncoder

        if decode is None:
            raise ValueError("length_predictor='sentence': needs text, and this model has no tokenizer")
        return SentenceEncoder.load(model, decode)
    raise ValueError(f"length_predictor={kind!r}: must be one of {', '.join(ENCODERS)}")
