"""The facts that determine an engine's speed. Profiles with equal facts are interchangeable."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import torch

from alignedserve.engine.build import BuiltEngine
from alignedserve.engine.config import EngineConfig
from alignedserve.instance.profile.saved import POOL_FACT
from alignedserve.kv.format import BlockFormat
from alignedserve.models.config import ModelConfig
from alignedserve.timing.cost import ExpertCounts
from alignedserve.version import __version__


def facts_of(built: BuiltEngine, config: EngineConfig, pool_kv_dtype: str = "auto") -> dict[str, str]:
    cache = built.engine.cache
    return facts_from(
        built.model_config,
        cache.format,
        config,
        cache.blocks.device,
        torch.get_num_threads(),
        pool_kv_dtype,
    )


def experts_of(config: ModelConfig) -> ExpertCounts | None:
    return ExpertCounts(config.moe.num_experts, config.moe.top_k) if config.moe else None


def facts_from(
    model_config: ModelConfig,
    form: BlockFormat,
    config: EngineConfig,
    device: torch.device,
    num_threads: int,
    pool_kv_dtype: str = "auto",
) -> dict[str, str]:
    """Returns the facts. The weights' values don't matter, but the model's shape does; it is included as a digest."""
    digest = hashlib.sha256(repr(model_config).encode()).hexdigest()[:12]
    found = {
        "alignedserve": __version__,
        "torch": str(torch.__version__),
        # Not the directory's name: serve gives instances the directory where the model was found.
        "model": _shape_name(model_config),
        "shape": digest,
        "device": _device_name(device),
        "threads": str(num_threads) if device.type == "cpu" else "",
        "attention_backend": config.attention_backend,
        "decode_kernel": config.decode_kernel,
        "enforce_eager": str(config.enforce_eager),
        "quantization": config.quantization or "",
    } | form.describe()
    # Omitted if the pool's format is the instances' own, as in profiles of earlier versions.
    return found if pool_kv_dtype == "auto" else found | {POOL_FACT: pool_kv_dtype}


def _shape_name(config: ModelConfig) -> str:
    return f"{config.architecture}-{config.num_layers}x{config.hidden_size}"


def _device_name(device: torch.device) -> str:
    return str(torch.cuda.get_device_name(device)) if device.type == "cuda" else _cpu_name()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
