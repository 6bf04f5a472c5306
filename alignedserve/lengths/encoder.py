"""Turns prompts into vectors of length 1. Similar prompts have similar vectors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

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
