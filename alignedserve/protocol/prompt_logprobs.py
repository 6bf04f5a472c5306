"""A prompt's log-probabilities on their way from the prefill instance that computed them to the gateway.

They are many, and no process in between looks at them, so they travel packed, with the request's first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

# One token's (log-probability, rank, {likeliest token: log-probability}), the likeliest first.
TokenLogprobs = tuple[float, int, dict[int, float]]

# Each takes sixteen bytes at most when packed; so many take four megabytes, of a message's sixty-four.
MAX_PROMPT_LOGPROBS = 1 << 18
# They are packed in groups of so many tokens: to unpack all of a long prompt's at once would hold up everything else.
STEP_TOKENS = 64

_encoder = msgspec.msgpack.Encoder()
_parts_decoder = msgspec.msgpack.Decoder(list[bytes])
_decoder = msgspec.msgpack.Decoder(list[TokenLogprobs])


def pack(found: Sequence[TokenLogprobs]) -> bytes:
    """Packs the log-probabilities of all of a prompt's tokens but the first, which nothing predicts."""
    starts = range(0, len(found), STEP_TOKENS)
    return _encoder.encode([_encoder.encode(found[start : start + STEP_TOKENS]) for start in starts])


def unpack(packed: bytes) -> Iterator[list[TokenLogprobs]]:
    """Yields one group of tokens after the other."""
    for part in _parts_decoder.decode(packed):
        yield _decoder.decode(part)
