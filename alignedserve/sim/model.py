"""A model with output that tests can predict: the number of tokens and the tokens are a function of the request's
seed."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from alignedserve.protocol.messages import Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestKey

VOCABULARY = 50_000
# Tokens of a prompt per hash id: the block size of Mooncake's traces.
TOKENS_PER_ID = 512
# The first token of a piece of a prompt: one for pieces with a hash id, one for a request's own pieces.
_NAMED, _OWN = 1, 2
_SALT_BITS = 31
_MASK = (1 << 64) - 1


def seed_for(num_output_tokens: int, salt: int) -> int:
    return num_output_tokens << _SALT_BITS | salt % (1 << _SALT_BITS)


def sample(seed: int, k: int) -> int:
    """Returns the request's output token k: a hash (SplitMix64's mixing), like the engine's noise."""
    mixed = (seed * 0x9E3779B97F4A7C15 + k * 0xD1342543DE82EF95) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) % VOCABULARY


def num_output_tokens(request: Request, max_model_len: int) -> int:
    """Returns the number of output tokens of the complete request."""
    room = max_model_len - len(request.prompt)
    return min(own_output_len(request.seed), request.params.max_tokens or room, room)


def own_output_len(seed: int) -> int:
    """Returns the number of output tokens after which the answer stops by itself, whatever its limits are."""
    return seed >> _SALT_BITS


def finish_reason(
    seed: int, prompt_len: int, max_tokens: int | None, num_output_tokens: int, max_model_len: int
) -> str | None:
    if num_output_tokens >= own_output_len(seed):
        return "stop"
    is_full = prompt_len + num_output_tokens >= max_model_len
    return "length" if is_full or (max_tokens is not None and num_output_tokens >= max_tokens) else None


def make_request(
    key: int,
    prompt_len: int,
    num_output_tokens: int,
    arrival_s: float,
    max_tokens: int | None = None,
    ttft_s: float | None = None,
    tbt_s: float | None = None,
    tier: str = "rt",
    deadline_s: float | None = None,
    prompt: list[int] | None = None,
) -> Request:
    """Returns a request. `prompt`: its tokens, if prompts are distinguished by them."""
    return Request(
        key=RequestKey(key),
        prompt=_prompt(prompt_len) if prompt is None else prompt,
        params=SamplingParams(max_tokens=max_tokens),
        seed=seed_for(num_output_tokens, key),
        arrival_s=arrival_s,
        ttft_s=ttft_s,
        tbt_s=tbt_s,
        # Marks the objectives as defaults, so that a request with an impossible one misses it and is not refused.
        slo_defaults=["ttft_s", "tbt_s"],
        tier=tier,
        deadline_s=deadline_s,
    )


@lru_cache(maxsize=4096)
def _prompt(prompt_len: int) -> list[int]:
    """Returns a prompt that all prompts of this length share. No code writes to a prompt."""
    return [0] * prompt_len


def prompt_of(key: int, prompt_len: int, hash_ids: Sequence[int]) -> list[int]:
    """Returns a prompt that shares its beginning with prompts that have the same first ids, and differs from all others
    after that."""
    prompt: list[int] = []
    for each in hash_ids:
        prompt += _piece(_NAMED, each, TOKENS_PER_ID)
    del prompt[prompt_len:]
    return prompt + _piece(_OWN, key, prompt_len - len(prompt))


def _piece(kind: int, number: int, num_tokens: int) -> list[int]:
    """Returns tokens that no other number has: its digits to the base of the vocabulary, then zeros."""
    tokens = [kind]
    while number:
        number, digit = divmod(number, VOCABULARY)
        tokens.append(digit)
    return (tokens + [0] * num_tokens)[:num_tokens]
