"""What follows from a configuration and a model's config alone, before anything is loaded: no torch in here.

The launcher, the pool and the gateway need it too, and must come to the same answers as the instances.
"""

from __future__ import annotations

import logging

from alignedserve.config import EngineConfig
from alignedserve.engine.validate import Vocabulary
from alignedserve.kv_format import BlockFormat
from alignedserve.models.config import ModelConfig

logger = logging.getLogger(__name__)

# as vLLM has them
_DTYPE_ALIASES = {"half": "float16", "float": "float32"}


def choose_dtype(config: EngineConfig, model_config: ModelConfig, is_cpu: bool) -> str:
    if config.dtype != "auto":
        return _DTYPE_ALIASES.get(config.dtype, config.dtype)
    if model_config.dtype == "float16" and is_cpu:
        logger.warning(
            "The checkpoint is float16, which CPUs are slow at: running in bfloat16. --dtype overrides"
        )
        return "bfloat16"
    return model_config.dtype


def choose_max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    limit = model_config.max_position
    if config.max_model_len is not None and config.max_model_len > limit:
        raise ValueError(
            f"max_model_len={config.max_model_len}: the model was made for at most {limit} tokens"
        )
    return config.max_model_len or limit


def vocabulary_of(model_config: ModelConfig) -> Vocabulary:
    # configs name end tokens that the model does not have: it never says them
    eos_token_ids = frozenset(
        token for token in model_config.eos_token_ids if token < model_config.vocab_size
    )
    return Vocabulary(model_config.vocab_size, eos_token_ids)


def block_format(config: EngineConfig, model_config: ModelConfig, dtype: str) -> BlockFormat:
    return BlockFormat(
        model_config.num_layers,
        config.block_size,
        model_config.num_kv_heads,
        model_config.head_dim,
        dtype,
    )
