"""What a predictor is asked about an answer's length, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alignedserve.sampling_params import SamplingParams

Vector = NDArray[np.float32]

Source = Literal["given", "neighbours", "regression", "class", "unknown"]
# By the answers to similar prompts; by the regression over all answers; by the mean of the class.
LEARNED: tuple[Source, ...] = ("neighbours", "regression", "class")
# Besides these: the request itself determines it; or nothing is known yet, and the length is 0.
SOURCES: tuple[Source, ...] = ("given", *LEARNED, "unknown")


@dataclass(frozen=True, eq=False)
class Query:
    """All that the predictor knows about a request."""

    # The prompt's vector, whose length is 1.
    vector: Vector
    prompt_len: int
    # "rt" or "be".
    tier: str
    # No answer is shorter than `least` or longer than `most`.
    least: int
    most: int
    # Whether the answer ends when the model wants it to.
    is_natural: bool

    def clamp(self, length: float) -> int:
        return max(self.least, min(round(length), self.most))


@dataclass(frozen=True)
class Prediction:
    # The predicted number of output tokens, the one that ends the answer included; 0: nothing is known.
    length: int
    source: Source
    # 1 / (1 + the relative error that such predictions have had).
    confidence: float
    # What the predictor learns from when the answer has ended.
    query: Query = field(repr=False, compare=False)
    # What each way of predicting returns.
    guesses: Mapping[Source, int] = field(default_factory=dict)
    # The similarity of the nearest past prompt; 0: none is near enough.
    similarity: float = 0.0


def query_of(vector: Vector, prompt_len: int, params: SamplingParams, tier: str, max_model_len: int) -> Query:
    room = max(1, max_model_len - prompt_len)
    most = min(params.max_tokens or room, room)
    is_natural = not params.ignore_eos or bool(params.stop_strings or params.stop_token_ids)
    least = min(max(1, params.min_tokens), most) if is_natural else most
    return Query(vector, prompt_len, tier, least, most, is_natural)
