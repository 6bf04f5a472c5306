"""Log-probabilities as answers show them: in the lists of OpenAI's completions, and in vLLM's of a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

from alignedserve.prompt_logprobs import TokenLogprobs

Json = dict[str, Any]
# of a token
TextOf = Callable[[int], str]


def completion_logprobs(
    token_ids: Sequence[int],
    found: Sequence[TokenLogprobs | None],
    num_likeliest: int,
    offsets: list[int],
    text_of: TextOf,
) -> Json:
    """`found`: of each token; None of a prompt's first. `offsets`: where their texts begin."""
    texts = [text_of(token_id) for token_id in token_ids]
    return {
        "tokens": texts,
        "token_logprobs": [each and each[0] for each in found],
        "top_logprobs": [
            each and _likeliest(each, num_likeliest, text_of) | {text: each[0]}
            for text, each in zip(texts, found, strict=True)
        ],
        "text_offset": offsets,
    }


class TextOffsets:
    """Where the texts of a growing list of tokens begin. Tokens that are part of one character share its offset."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def append(self, token_ids: Sequence[int], offset: int) -> list[int]:
        """`offset`: where the text of the first of them begins."""
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += len(self._decoder.decode(self._bytes_of(token_id)))
        return offsets


def _likeliest(found: TokenLogprobs, num: int, text_of: TextOf) -> dict[str, float]:
    return {text_of(token_id): logprob for token_id, logprob in islice(found[2].items(), num)}


def prompt_positions(
    token_ids: Sequence[int], found: Sequence[TokenLogprobs], num_likeliest: int, text_of: TextOf
) -> list[Json | None]:
    """vLLM's: of each prompt token itself and the likeliest in its place, by id; None of the first."""
    pairs = zip(token_ids[1:], found, strict=True)
    return [None, *(_position(token_id, each, num_likeliest, text_of) for token_id, each in pairs)]


def _position(token_id: int, found: TokenLogprobs, num_likeliest: int, text_of: TextOf) -> Json:
    logprob, rank, likeliest = found
    named = {token_id: (logprob, rank)}
    for position, (other, its_logprob) in enumerate(islice(likeliest.items(), num_likeliest), 1):
        named.setdefault(other, (its_logprob, position))
    return {
        str(each): {"logprob": its_logprob, "rank": its_rank, "decoded_token": text_of(each)}
        for each, (its_logprob, its_rank) in named.items()
    }
