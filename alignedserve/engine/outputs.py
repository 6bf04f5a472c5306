"""What an iteration yields for its requests. Nothing here needs torch: readers may run where nothing computes."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.types import RequestId


class BrokenLogits(RuntimeError):
    """The model's logits for this request hold NaN or infinity."""


@dataclass(frozen=True)
class TokenLogprobs:
    """One position: the chosen token first, then the likeliest ones (which may contain it again)."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(slots=True)
class TokenOutput:
    """What one iteration yielded for one request."""

    request_id: RequestId
    # It is None if the request ended without a token, as one for an embedding does, or only prompt_logprobs are
    # reported.
    token_id: int | None
    # It is "stop", "length", "error", or None while the request goes on.
    finish_reason: str | None = None
    # The stop token that ended it, if that was not the end of sequence.
    stop_reason: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    # The embedding of the prompt, with the end of a request for one: float32, little-endian.
    embedding: bytes = b""
    error: Exception | None = None
