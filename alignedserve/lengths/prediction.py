"""What is asked about an answer's length, and what is said of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alignedserve.sampling_params import SamplingParams

Vector = NDArray[np.float32]

Source = Literal["given", "neighbours", "regression", "class", "unknown"]
# Answers to similar prompts; the regression over all of them; the mean of the class.
LEARNED: tuple[Source, ...] = ("neighbours", "regression", "class")
# Besides: the request itself says it; nothing is known yet, and the length is 0.
SOURCES: tuple[Source, ...] = ("given", *LEARNED, "unknown")


@dataclass(frozen=True, eq=False)
class Query:
    """All that the predictor knows of a request."""

    # of the prompt, of length 1
    vector: Vector
    prompt_len: int
    # "rt" or "be"
    tier: str
    # no answer is shorter or longer
    least: int
    most: int
    # it ends when the model wants to
    is_natural: bool

    def clamp(self, length: float) -> int:
        return max(self.least, min(round(length), self.most))


@dataclass(frozen=True)
class Prediction:
    # output tokens, the one that ends it included; 0: nothing is known
    length: int
    source: Source
    # 1 over (1 + the relative error that such predictions have had)
    confidence: float
    # to learn from, when it has ended
    query: Query = field(repr=False, compare=False)
    # what each way of predicting says
    guesses: Mapping[Source, int] = field(default_factory=dict)
    # of the nearest past prompt; 0: none is near enough
    similarity: float = 0.0


def query_of(vector: Vector, prompt_len: int, params: SamplingParams, tier: str, max_model_len: int) -> Query:
    room = max(1, max_model_len - prompt_len)
    most = min(params.max_tokens or room, room)
    is_natural = not params.ignore_eos or bool(params.stop_strings or params.stop_token_ids)
    least = min(max(1, params.min_tokens), most) if is_natural else most
    return Query(vector, prompt_len, tier, least, most, is_natural)
