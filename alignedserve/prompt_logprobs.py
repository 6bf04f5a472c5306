"""A prompt's log-probabilities on their way from the prefill instance that computed them to the gateway.

They are many, and nobody in between looks at them: they travel packed, with the request's first token.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from alignedserve.types import InvalidRequest

# of one token: (log-probability, rank, {likeliest token: log-probability}, the likeliest first)
TokenLogprobs = tuple[float, int, dict[int, float]]

# What one request may ask for. Packed, each takes sixteen bytes at most: four megabytes of a message's sixty-four.
MAX_PROMPT_LOGPROBS = 1 << 18

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[TokenLogprobs])


def pack(found: Sequence[TokenLogprobs]) -> bytes:
    """Those of all of a prompt's tokens but the first, which nothing predicts."""
    return _encoder.encode(found)


def unpack(packed: bytes) -> list[TokenLogprobs]:
    return _decoder.decode(packed)


def check_number(num_prompt_tokens: int, num_likeliest: int | None) -> None:
    """Raises InvalidRequest for more than one request may ask for."""
    if num_likeliest is None:
        return
    number = num_prompt_tokens * (num_likeliest + 1)
    if number > MAX_PROMPT_LOGPROBS:
        raise InvalidRequest(
            f"prompt_logprobs={num_likeliest}: of {num_prompt_tokens} prompt tokens these are {number} "
            f"log-probabilities, and at most {MAX_PROMPT_LOGPROBS} are given"
        )
