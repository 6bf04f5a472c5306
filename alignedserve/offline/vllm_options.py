"""Options of vLLM's LLM class that scripts commonly set and that change nothing here, or allow one value only."""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

# The values that each option accepts; None if it accepts any.
_ACCEPTED: dict[str, tuple[Any, ...] | None] = {
    "pipeline_parallel_size": (1,),
    # Code from a model's directory never runs.
    "trust_remote_code": None,
    "enable_chunked_prefill": (True, None),
    "tokenizer_mode": ("auto",),
    "swap_space": None,
    "disable_log_stats": None,
    # All adapters are loaded, and a batch may have all of them.
    "max_loras": None,
    "max_cpu_loras": None,
    "lora_dtype": ("auto",),
}


def without_vllm_options(options: dict[str, Any]) -> dict[str, Any]:
    """Returns the other options. Raises ValueError where a value asks for what is not supported here."""
    for name in options.keys() & _ACCEPTED.keys():
        accepted = _ACCEPTED[name]
        if accepted is not None and options[name] not in accepted:
            raise ValueError(
                f"{name}={options[name]!r}: only {' or '.join(map(repr, accepted))} is supported"
            )
        logger.info("%s has no effect", name)
    return {name: value for name, value in options.items() if name not in _ACCEPTED}
