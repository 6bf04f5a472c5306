"""Checks requests in one place. Every mistake that a caller can make is found here, before anything is queued."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from alignedserve.protocol.pooling import POOLINGS
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InvalidRequest


@dataclass(frozen=True)
class Vocabulary:
    # Rows of the embedding. Token ids are 0 .. size - 1.
    size: int
    eos_token_ids: frozenset[int]


def check_request(
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    vocabulary: Vocabulary,
    max_model_len: int,
    pooling: str | None = None,
) -> None:
    """Raises InvalidRequest naming the field, its value and what is allowed. `pooling`: see `Request`."""
    length = len(prompt_token_ids)
    if length == 0:
        raise InvalidRequest("prompt: empty; at least one token is needed")
    if pooling is not None:
        _check_pooling(pooling, length, max_model_len)
    elif length >= max_model_len:
        raise InvalidRequest(
            f"prompt: {length} tokens; with max_model_len={max_model_len}, at most {max_model_len - 1} leave room "
            "for one output token"
        )
    check_ids("prompt_token_ids", prompt_token_ids, vocabulary)
    check_ids("stop_token_ids", params.stop_token_ids or (), vocabulary)
    check_ids("logit_bias", list(params.logit_bias or ()), vocabulary)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if count is not None and count > vocabulary.size:
            raise InvalidRequest(f"{name}={count}: must be at most the vocabulary's size, {vocabulary.size}")


def _check_pooling(pooling: str, length: int, max_model_len: int) -> None:
    if pooling not in POOLINGS:
        raise InvalidRequest(f"pooling={pooling!r}: must be one of {', '.join(POOLINGS)}")
    if length > max_model_len:
        raise InvalidRequest(f"prompt: {length} tokens; at most {max_model_len} are possible")


def check_adapter(name: str, known: Collection[str]) -> None:
    """Raises InvalidRequest for an unknown adapter. `name` is empty if the request has none."""
    if name and name not in known:
        raise InvalidRequest(f"adapter={name!r}: not loaded; loaded are {', '.join(known) or 'none'}")


def check_ids(name: str, ids: Sequence[int], vocabulary: Vocabulary) -> None:
    try:
        array = np.asarray(ids)
        is_integers = array.ndim == 1 and (array.size == 0 or array.dtype.kind in "iu")
    except (ValueError, OverflowError):
        is_integers = False
    if not is_integers:
        raise InvalidRequest(f"{name}: must be a flat list of integers")
    outside = array[(array < 0) | (array >= vocabulary.size)]
    if len(outside):
        raise InvalidRequest(
            f"{name}: token id {outside[0]} is outside the vocabulary, 0 to {vocabulary.size - 1}"
        )
