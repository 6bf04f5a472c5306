"""The results of an iteration for its requests. Nothing here needs torch, so any process can read them."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.types import RequestId


class BrokenLogits(RuntimeError):
    """The model's logits for this request contain NaN or infinity."""


@dataclass(frozen=True)
class TokenLogprobs:
    """One position: the chosen token, then the likeliest ones, which may contain it again."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(slots=True)
class TokenOutput:
    """The result of one iteration for one request."""

    request_id: RequestId
    # None if the request ended without a token, as one for an embedding does, or if only prompt_logprobs are reported.
    token_id: int | None
    # "stop", "length" or "error"; None while the request continues.
    finish_reason: str | None = None
    # The stop token that ended it, unless that was the end of sequence.
    stop_reason: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    # The embedding of the prompt, with the end of a request for one. float32, little-endian.
    embedding: bytes = b""
    error: Exception | None = None
