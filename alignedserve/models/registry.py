"""The model class of each architecture, by name."""

from __future__ import annotations

from alignedserve.models.base import Model
from alignedserve.models.config import ModelConfig
from alignedserve.models.llama import GptOss, Llama, Mixtral
from alignedserve.models.opt import Opt
from alignedserve.models.weights import WeightSource
from alignedserve.ops.base import Ops

MODELS: dict[str, type[Llama] | type[Opt]] = {
    "llama": Llama,
    "mistral": Llama,
    "ministral": Llama,
    "qwen2": Llama,
    "qwen3": Llama,
    "qwen3_moe": Llama,
    "mixtral": Mixtral,
    "phi3": Llama,
    "gemma3": Llama,
    "gpt_oss": GptOss,
    "opt": Opt,
}


def build_model(config: ModelConfig, weights: WeightSource, ops: Ops, max_model_len: int) -> Model:
    if config.architecture not in MODELS:
        raise ValueError(f"architecture={config.architecture!r}: known are {', '.join(sorted(MODELS))}")
    return MODELS[config.architecture](config, weights, ops, max_model_len)
