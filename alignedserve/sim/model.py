"""A model that says what a test can foretell: how many tokens and which is a function of the request's seed alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from alignedserve.protocol.messages import Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestKey

VOCABULARY = 50_000
# Tokens of a prompt that a hash id names: Mooncake's traces have blocks of this size.
TOKENS_PER_ID = 512
# The first token of a piece of a prompt: a piece that a hash id names, or one that only its request has.
_NAMED, _OWN = 1, 2
_SALT_BITS = 31
_MASK = (1 << 64) - 1


def seed_for(num_output_tokens: int, salt: int) -> int:
    return num_output_tokens << _SALT_BITS | salt % (1 << _SALT_BITS)


def sample(seed: int, k: int) -> int:
    """The request's output token k: a hash (SplitMix64's mixing), as the engine's noise is."""
    mixed = (seed * 0x9E3779B97F4A7C15 + k * 0xD1342543DE82EF95) & _MASK
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK
    return (mixed ^ mixed >> 31) % VOCABULARY


def num_output_tokens(request: Request, max_model_len: int) -> int:
    """When it has ended."""
    room = max_model_len - len(request.prompt)
    return min(own_output_len(request.seed), request.params.max_tokens or room, room)


def own_output_len(seed: int) -> int:
    """The number of output tokens with which the answer stops by itself, whatever its limits are."""
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
    """`prompt`: its tokens, where prompts are told apart by them."""
    return Request(
        key=RequestKey(key),
        prompt=_prompt(prompt_len) if prompt is None else prompt,
        params=SamplingParams(max_tokens=max_tokens),
        seed=seed_for(num_output_tokens, key),
        arrival_s=arrival_s,
        ttft_s=ttft_s,
        tbt_s=tbt_s,
        # Objectives are marked as defaults, so that one that can't be kept is missed, and the request is not refused.
        slo_defaults=["ttft_s", "tbt_s"],
        tier=tier,
        deadline_s=deadline_s,
    )


@lru_cache(maxsize=4096)
def _prompt(prompt_len: int) -> list[int]:
    """Shared by all prompts of this length: nobody writes to a prompt."""
    return [0] * prompt_len


def prompt_of(key: int, prompt_len: int, hash_ids: Sequence[int]) -> list[int]:
    """Returns a prompt that begins as those with the same first ids do, and then as no other one does."""
    prompt: list[int] = []
    for each in hash_ids:
        prompt += _piece(_NAMED, each, TOKENS_PER_ID)
    del prompt[prompt_len:]
    return prompt + _piece(_OWN, key, prompt_len - len(prompt))


def _piece(kind: int, number: int, num_tokens: int) -> list[int]:
    """Returns tokens that are no other number's: its digits, with the vocabulary for a base, and zeros."""
    tokens = [kind]
    while number:
        number, digit = divmod(number, VOCABULARY)
        tokens.append(digit)
    return (tokens + [0] * num_tokens)[:num_tokens]
