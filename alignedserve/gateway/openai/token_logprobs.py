"""Log-probabilities in the form of answers: the lists of OpenAI's completions and chats, and vLLM's for a prompt."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, islice

from alignedserve.gateway.http.json_pieces import Json
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.protocol.prompt_logprobs import TokenLogprobs, unpack

# Returns the text of a token.
TextOf = Callable[[int], str]


# The log-probability of an impossible token, as in vLLM: JSON has no infinity.
LEAST_LOGPROB = -9999.0


def completion_logprobs(
    token_ids: Sequence[int],
    found: Sequence[TokenLogprobs | None],
    num_likeliest: int,
    offsets: list[int],
    text_of: TextOf,
) -> Json:
    """Returns the lists of a completion. `found` has the log-probabilities at each token, None for a prompt's first
    one. `offsets` are where the tokens' texts begin."""
    texts = [text_of(token_id) for token_id in token_ids]
    return {
        "tokens": texts,
        "token_logprobs": [each and finite(each[0]) for each in found],
        "top_logprobs": [
            each and _likeliest(each, num_likeliest, text_of) | {text: finite(each[0])}
            for text, each in zip(texts, found, strict=True)
        ],
        "text_offset": offsets,
    }


def echoed_logprobs(
    prompt: Sequence[int],
    packed: bytes,
    num_likeliest: int,
    bytes_of: Callable[[int], bytes],
    text_of: TextOf,
) -> Iterator[Json]:
    """Yields the lists of a completion for its prompt, some tokens at a time."""
    offsets = TextOffsets(bytes_of)
    offset, place = 0, 0
    parts: Iterator[list[TokenLogprobs | None]] = chain([[None]], map(list, unpack(packed)))
    for found in parts:
        tokens = prompt[place : place + len(found)]
        begins = offsets.append(tokens, offset)
        yield completion_logprobs(tokens, found, num_likeliest, begins, text_of)
        offset, place = offsets.end, place + len(found)


def finite(logprob: float) -> float:
    return max(logprob, LEAST_LOGPROB)


def chat_logprobs(
    token_ids: Sequence[int], found: Sequence[TokenLogprobs], model: ServedModel, text_of: TextOf
) -> list[Json]:
    """Returns the list of chats and responses: an object for each token."""
    return [_token(token_id, each, model, text_of) for token_id, each in zip(token_ids, found, strict=True)]


def _token(token_id: int, found: TokenLogprobs, model: ServedModel, text_of: TextOf) -> Json:
    logprob, _, top = found
    likeliest = sorted(top.items(), key=lambda item: -item[1])
    named = [_named(other, its_logprob, model, text_of) for other, its_logprob in likeliest]
    return _named(token_id, logprob, model, text_of) | {"top_logprobs": named}


def _named(token_id: int, logprob: float, model: ServedModel, text_of: TextOf) -> Json:
    its_bytes = model.token_bytes(token_id)
    return {"token": text_of(token_id), "logprob": finite(logprob), "bytes": list(its_bytes)}


class TextOffsets:
    """Where the texts of a growing list of tokens begin. Tokens that are part of one character share its offset."""

    def __init__(self, bytes_of: Callable[[int], bytes]) -> None:
        self._bytes_of = bytes_of
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        # Where the text of the last token ends.
        self.end = 0

    def append(self, token_ids: Sequence[int], offset: int) -> list[int]:
        """Returns where the text of each token begins. The first one begins at `offset`."""
        offsets = []
        for token_id in token_ids:
            offsets.append(offset)
            offset += len(self._decoder.decode(self._bytes_of(token_id)))
        self.end = offset
        return offsets


def _likeliest(found: TokenLogprobs, num: int, text_of: TextOf) -> dict[str, float]:
    return {text_of(token_id): finite(logprob) for token_id, logprob in islice(found[2].items(), num)}


def prompt_positions(
    token_ids: Sequence[int], packed: bytes, num_likeliest: int, text_of: TextOf
) -> Iterator[Json | None]:
    """Yields vLLM's object for each prompt token: the token itself and the most likely ones at its position, by id.
    None for the first token."""
    yield None
    pairs = zip(token_ids[1:], chain.from_iterable(unpack(packed)), strict=True)
    for token_id, found in pairs:
        yield _position(token_id, found, num_likeliest, text_of)


def _position(token_id: int, found: TokenLogprobs, num_likeliest: int, text_of: TextOf) -> Json:
    logprob, rank, likeliest = found
    named = {token_id: (logprob, rank)}
    for position, (other, its_logprob) in enumerate(islice(likeliest.items(), num_likeliest), 1):
        named.setdefault(other, (its_logprob, position))
    return {
        str(each): {"logprob": finite(its_logprob), "rank": its_rank, "decoded_token": text_of(each)}
        for each, (its_logprob, its_rank) in named.items()
    }
