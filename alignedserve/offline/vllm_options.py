"""Common options of vLLM's LLM class that have no effect here, or only one allowed value."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

# Accepted values of each option; None accepts any.
_ACCEPTED: dict[str, tuple[Any, ...] | None] = {
    "pipeline_parallel_size": (1,),
    # Code from a model's directory is never executed.
    "trust_remote_code": None,
    "enable_chunked_prefill": (True, None),
    "tokenizer_mode": ("auto",),
    "swap_space": None,
    "disable_log_stats": None,
    # A batch may use all adapters.
    "max_cpu_loras": None,
    "lora_dtype": ("auto",),
}


def without_vllm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options without these. Raises ValueError for an unsupported value."""
    for name in options.keys() & _ACCEPTED.keys():
        accepted = _ACCEPTED[name]
        if accepted is not None and options[name] not in accepted:
            raise ValueError(
                f"{name}={options[name]!r}: only {' or '.join(map(repr, accepted))} is supported"
            )
        logger.info("%s has no effect", name)
    kept = {name: value for name, value in options.items() if name not in _ACCEPTED}
    has_no_places = kept.get("tensor_parallel_size", 1) != 1 or kept.get("hidden_cache")
    # Adapters that are loaded with the model need none.
    if has_no_places and kept.pop("max_loras", 0):
        logger.info("max_loras has no effect")
    return kept
