"""The results of generate, shaped like vLLM's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

# finish_reason is "stop" (end of sequence, stop string or stop token), "length", "error" or "abort".


@dataclass(frozen=True)
class Logprob:
    logprob: float
    # Rank 1 is the most likely token.
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
    # Stop string or stop token id that ended the text; None for the end of sequence.
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
    # None for the first token, which has no prediction.
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    # Prompt tokens with KV in the prefix cache.
    num_cached_tokens: int = 0
