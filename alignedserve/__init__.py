"""LLM serving for real-time chat and best-effort documents on the same machines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from alignedserve.version import __version__

if TYPE_CHECKING:
    from alignedserve.offline.llm import LLM
    from alignedserve.offline.lora_request import LoRARequest
    from alignedserve.offline.outputs import CompletionOutput, RequestOutput
    from alignedserve.sampling_params import SamplingParams
    from alignedserve.structured_outputs import StructuredOutputsParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]

_HOMES = {
    "LLM": "alignedserve.offline.llm",
    "LoRARequest": "alignedserve.offline.lora_request",
    "CompletionOutput": "alignedserve.offline.outputs",
    "RequestOutput": "alignedserve.offline.outputs",
    "SamplingParams": "alignedserve.sampling_params",
    "StructuredOutputsParams": "alignedserve.structured_outputs",
}


def __getattr__(name: str) -> Any:
    """Imports a public name on first use, so that the command line answers --help without loading torch."""
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
