"""The input and the result of a length prediction."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from alignedserve.sampling_params import SamplingParams

Vector = NDArray[np.float32]

Source = Literal["given", "neighbours", "regression", "class", "unknown"]
# From the answers to similar prompts; from the regression over all answers; from the mean of the class.
LEARNED: tuple[Source, ...] = ("neighbours", "regression", "class")
# "given": the request itself determines the length. "unknown": nothing is known yet, and the length is 0.
SOURCES: tuple[Source, ...] = ("given", *LEARNED, "unknown")


@dataclass(frozen=True, eq=False)
class Query:
    """Everything that the predictor knows about a request."""

    # The prompt's vector, of length 1.
    vector: Vector
    prompt_len: int
    # "rt" or "be".
    tier: str
    # No answer is shorter than `least` or longer than `most`.
    least: int
    most: int
    # Whether the model itself can end the answer.
    is_natural: bool

    def clamp(self, length: float) -> int:
        return max(self.least, min(round(length), self.most))


@dataclass(frozen=True)
class Prediction:
    # The predicted number of output tokens, the last one included; 0: unknown.
    length: int
    source: Source
    # 1 / (1 + the relative error of such predictions so far).
    confidence: float
    # The predictor learns from it when the answer has ended.
    query: Query = field(repr=False, compare=False)
    # The prediction of each source.
    guesses: Mapping[Source, int] = field(default_factory=dict)
    # The similarity of the nearest past prompt; 0: none is near enough.
    similarity: float = 0.0


def query_of(vector: Vector, prompt_len: int, params: SamplingParams, tier: str, max_model_len: int) -> Query:
    room = max(1, max_model_len - prompt_len)
    most = min(params.max_tokens or room, room)
    is_natural = not params.ignore_eos or bool(params.stop_strings or params.stop_token_ids)
    least = min(max(1, params.min_tokens), most) if is_natural else most
    return Query(vector, prompt_len, tier, least, most, is_natural)
