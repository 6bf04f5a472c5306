"""What an iteration says about its requests. Free of torch: whoever reads it may run where nothing computes."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.types import RequestId


class BrokenLogits(RuntimeError):
    """The model's logits for this request hold NaN or infinity."""


@dataclass(frozen=True)
class TokenLogprobs:
    """One position: the chosen token first, then the likeliest ones (which may name it again)."""

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


@dataclass(slots=True)
class TokenOutput:
    """What one iteration did for one request."""

    request_id: RequestId
    # None when the request ended without a token, or only prompt_logprobs are reported
    token_id: int | None
    # "stop", "length", "error", or None while it goes on
    finish_reason: str | None = None
    # the stop token that ended it, if it was not the end of sequence
    stop_reason: int | None = None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    error: Exception | None = None
