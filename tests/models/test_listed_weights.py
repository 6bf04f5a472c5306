"""The weights that a model lists are those that it takes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from alignedserve.models.hf_config import load_model_config
from alignedserve.models.listed_weights import num_weight_bytes
from alignedserve.models.presets import PRESETS
from alignedserve.models.registry import build_model
from alignedserve.models.safetensors_source import SafetensorsSource
from alignedserve.models.weights import TakePart
from alignedserve.ops.torch_ops import TorchOps


class Counted:
    def __init__(self, source: SafetensorsSource) -> None:
        self.source, self.num_values = source, 0

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        tensor = self.source.take(name, shape)
        self.num_values += tensor.numel()
        return tensor

    def linear(self, layer: str, num_out: int, num_in: int) -> torch.Tensor:
        return self.take(f"{layer}.weight", (num_out, num_in))

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        self.num_values += num_experts * num_out * num_in
        return self.source.of_experts(layer, num_experts, num_out, num_in)

    def finish(self) -> None:
        self.source.finish()


def source_of(directory: Path) -> SafetensorsSource:
    return SafetensorsSource(directory, torch.float32, "cpu", progress=False)


@pytest.mark.parametrize(
    "family",
    [
        "llama-gqa-tied",
        "mistral-window",
        "qwen2",
        "qwen3",
        "qwen3-moe",
        "mixtral",
        "phi3-partial-window",
        "gemma3",
        "gpt-oss",
        "opt-post-norm",
    ],
)
def test_all_that_a_model_takes_is_counted(tiny_model: Callable[[str], Path], family: str) -> None:
    directory = tiny_model(family)
    config, counted = load_model_config(directory), Counted(source_of(directory))
    build_model(config, counted, TorchOps(torch.float32), max_model_len=8)
    counted.finish()
    assert num_weight_bytes(config, torch.float32, source_of(directory)) == 4 * counted.num_values > 0
    assert num_weight_bytes(config, torch.float32, None) == 4 * counted.num_values


def test_nothing_is_read_of_the_weights(tiny_model: Callable[[str], Path]) -> None:
    source = source_of(tiny_model("qwen2"))
    for file in source._files:
        # a view of the map would be an error
        file.tensor = None  # type: ignore[method-assign, assignment]
    assert num_weight_bytes(load_model_config(tiny_model("qwen2")), torch.float32, source)


@pytest.mark.parametrize(
    ("preset", "billions"),
    [
        ("qwen3-30b-a3b", 30.532),
        ("mixtral-8x7b", 46.703),
        ("qwen3-8b", 8.191),
        ("gpt-oss-20b", 20.915),
        ("gpt-oss-120b", 116.829),
    ],
)
def test_presets_take_what_their_authors_say(preset: str, billions: float) -> None:
    num_bytes = num_weight_bytes(PRESETS[preset], torch.bfloat16, None)
    assert num_bytes / 2e9 == pytest.approx(billions, abs=5e-4)
