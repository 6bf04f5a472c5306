"""A model that was found, and its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from alignedserve.models.config import ModelConfig
from alignedserve.models.dummy_weights import DummySource
from alignedserve.models.locate import locate_model
from alignedserve.models.quantised.config import QuantisedConfig
from alignedserve.models.safetensors_source import SafetensorsSource
from alignedserve.models.weights import CheckpointSource, WeightSource


@dataclass(frozen=True)
class ModelSource:
    name: str
    config: ModelConfig
    # None for a preset, which has no files and so no tokenizer.
    directory: Path | None
    is_dummy: bool

    def open_weights(
        self, dtype: torch.dtype, device: torch.device | str, seed: int = 0, progress: bool = True
    ) -> WeightSource:
        if self.is_dummy or self.directory is None:
            return DummySource(dtype, device, seed)
        return open_checkpoint(self.directory, dtype, device, self.config.quantised, progress)


def open_checkpoint(
    directory: Path,
    dtype: torch.dtype,
    device: torch.device | str,
    quantised: QuantisedConfig | None,
    progress: bool = False,
) -> CheckpointSource[Any]:
    """Opens the weights of a model directory. Raises ValueError if they can't be read."""
    # This folder is imported by that one.
    from alignedserve.models.gguf.directory import linked_files
    from alignedserve.models.gguf.source import GgufSource

    if linked_files(directory):
        return GgufSource(directory, dtype, device, progress)
    return SafetensorsSource(directory, dtype, device, progress, quantised)


def resolve_model(model: str | Path, load_format: str = "auto", revision: str | None = None) -> ModelSource:
    """Finds the model. Raises the errors of `locate_model`."""
    found = locate_model(model, load_format, revision)
    return ModelSource(found.name, found.config, found.directory, found.is_dummy)
