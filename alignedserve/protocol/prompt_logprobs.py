"""A prompt's log-probabilities on their way from the prefill instance that computed them to the gateway.

They are many, and nobody in between looks at them: they travel packed, with the request's first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

# of one token: (log-probability, rank, {likeliest token: log-probability}, the likeliest first)
TokenLogprobs = tuple[float, int, dict[int, float]]

# Packed, each takes sixteen bytes at most; so many are four megabytes of a message's sixty-four.
MAX_PROMPT_LOGPROBS = 1 << 18
# They are packed so many tokens at a time: taken out at once, all of a long prompt's would hold everything else up.
STEP_TOKENS = 64

_encoder = msgspec.msgpack.Encoder()
_parts_decoder = msgspec.msgpack.Decoder(list[bytes])
_decoder = msgspec.msgpack.Decoder(list[TokenLogprobs])


def pack(found: Sequence[TokenLogprobs]) -> bytes:
    """Those of all of a prompt's tokens but the first, which nothing predicts."""
    starts = range(0, len(found), STEP_TOKENS)
    return _encoder.encode([_encoder.encode(found[start : start + STEP_TOKENS]) for start in starts])


def unpack(packed: bytes) -> Iterator[list[TokenLogprobs]]:
    """A part of them at a time."""
    for part in _parts_decoder.decode(packed):
        yield _decoder.decode(part)
