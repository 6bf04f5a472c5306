"""A prompt's log-probabilities on their way from the prefill instance that computed them to the gateway.

They are large, and no process in between reads them, so they travel packed, with the request's first token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

# One token's (log-probability, rank, {likeliest token: log-probability}), the likeliest first.
TokenLogprobs = tuple[float, int, dict[int, float]]

# Each takes at most sixteen bytes when packed, so this many take four of a message's sixty-four megabytes.
MAX_PROMPT_LOGPROBS = 1 << 18
# Tokens per packed group. Unpacking all of a long prompt at once would block everything else.
STEP_TOKENS = 64

_encoder = msgspec.msgpack.Encoder()
_parts_decoder = msgspec.msgpack.Decoder(list[bytes])
_decoder = msgspec.msgpack.Decoder(list[TokenLogprobs])


def pack(found: Sequence[TokenLogprobs]) -> bytes:
    """Packs the log-probabilities of all of a prompt's tokens but the first, which has none."""
    starts = range(0, len(found), STEP_TOKENS)
    return _encoder.encode([_encoder.encode(found[start : start + STEP_TOKENS]) for start in starts])


def unpack(packed: bytes) -> Iterator[list[TokenLogprobs]]:
    """Yields one group of tokens after the other."""
    for part in _parts_decoder.decode(packed):
        yield _decoder.decode(part)
