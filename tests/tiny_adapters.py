"""Adapters of the tiny models, as peft writes them, and the models that they are merged into."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

ATTENTION = ("q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "out_proj")
MLP = ("gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2")
CONFIG: dict[str, Any] = {"peft_type": "LORA", "bias": "none", "r": 8, "lora_alpha": 16, "use_rslora": False}


def write_adapter(
    directory: Path,
    model: Path,
    seed: int,
    targets: tuple[str, ...] = ATTENTION + MLP,
    spread: float = 0.2,
    **config: Any,
) -> Path:
    """Writes an adapter for all layers of the model with these names, and returns its directory. Its matrices are as
    large as they have to be for other tokens to come out."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = CONFIG | {"target_modules": list(targets)} | config
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, shape in _linear_layers(model).items():
        if name.rpartition(".")[2] in targets and ".experts." not in name and ".vision" not in name:
            for which, size in (("A", (settings["r"], shape[1])), ("B", (shape[0], settings["r"]))):
                key = f"base_model.model.{name}.lora_{which}.weight"
                tensors[key] = torch.randn(*size, generator=generator) * spread
    save_file(tensors, directory / "adapter_model.safetensors")
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    return directory


def merge(directory: Path, model: Path, adapter: Path) -> Path:
    """Saves the model with W + scale * B @ A for its weights, and returns its directory."""
    settings = json.loads((adapter / "adapter_config.json").read_text())
    root = math.sqrt(settings["r"]) if settings["use_rslora"] else settings["r"]
    tensors = load_file(adapter / "adapter_model.safetensors")
    whole = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    for key, a in tensors.items():
        if ".lora_A." in key:
            layer = whole.get_submodule(key.removeprefix("base_model.model.").removesuffix(".lora_A.weight"))
            b = tensors[key.replace("lora_A", "lora_B")]
            layer.weight.data += (settings["lora_alpha"] / root * b.double() @ a.double()).float()
    whole.save_pretrained(directory)
    return directory


@cache
def _linear_layers(model: Path) -> dict[str, tuple[int, int]]:
    whole = AutoModelForCausalLM.from_pretrained(model)
    return {
        name: (module.out_features, module.in_features)
        for name, module in whole.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
