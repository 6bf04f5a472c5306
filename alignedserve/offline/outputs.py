"""What generate returns, shaped like vLLM's results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# The values of finish_reason: "stop" (end of sequence, stop string or stop token), "length", "error" or "abort".


@dataclass(frozen=True)
class Logprob:
    logprob: float
    # The likeliest token has rank 1.
    rank: int
    decoded_token: str | None = None


# Maps each token id to its log-probability, for one position.
PositionLogprobs = dict[int, Logprob]


@dataclass
class CompletionOutput:
    index: int
    text: str
    token_ids: Sequence[int]
    cumulative_logprob: float | None
    logprobs: list[PositionLogprobs] | None
    finish_reason: str | None = None
    # The stop string or stop token id that ended it; None if that was the end of sequence.
    stop_reason: int | str | None = None
    # The error, if finish_reason is "error".
    error: Exception | None = None

    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    # It is None for the first token, which nothing predicts.
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    # The number of the prompt's tokens whose KV was there.
    num_cached_tokens: int = 0
