"""A model that says what a test can foretell: how many tokens and which is a function of the request's seed alone."""

from __future__ import annotations

from functools import lru_cache

from alignedserve.protocol.messages import Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import RequestKey

VOCABULARY = 50_000
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
) -> Request:
    return Request(
        key=RequestKey(key),
        prompt=_prompt(prompt_len),
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
