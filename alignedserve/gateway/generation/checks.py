"""The checks of every call, before and after its prompts are tokenised."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from alignedserve.gateway.generation.body import GenerationBody
from alignedserve.gateway.generation.prepared import packed
from alignedserve.gateway.limits.limits import Limits
from alignedserve.gateway.model.served_model import ServedModel
from alignedserve.sampling_params import SamplingParams


def check_body(body: GenerationBody, model: ServedModel, limits: Limits) -> None:
    """Checks the model's name and the numbers of token ids, before tokenising. Raises ApiError and InvalidRequest."""
    model.check_name(body.model)
    limits.check_counts(body.stop_token_ids, body.logit_bias)


def checked_prompts(
    body: GenerationBody,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    model: ServedModel,
    limits: Limits,
) -> SamplingParams:
    """Checks the prompts, and returns `params` with max_tokens reduced to what fits. Raises ApiError and
    InvalidRequest."""
    lengths = list(map(len, prompts))
    limits.check_prompts(lengths, params)
    for prompt in prompts:
        model.check(prompt, params)
    return limits.with_room_for_logprobs(lengths, params, body.num_kept_logprobs, model.max_model_len)


def fields_of(
    body: GenerationBody,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    structure_name: str,
    model: ServedModel,
) -> dict[str, Any]:
    """Returns the fields that every prepared call has."""
    return {
        "prompts": [packed(prompt) for prompt in prompts],
        "params": params,
        "structure_name": structure_name,
        "is_stream": bool(body.stream),
        "service_tier": body.service_tier,
        "ttft_ms": body.slo.ttft_ms if body.slo else None,
        "tbt_ms": body.slo.tbt_ms if body.slo else None,
        "cache_salt": body.cache_salt or "",
        "adapter": model.adapter_of(body.model),
    }
