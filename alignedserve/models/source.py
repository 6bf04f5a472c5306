"""A model that was found, and its weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from alignedserve.models.config import ModelConfig
from alignedserve.models.locate import locate_model
from alignedserve.models.weights import DummySource, SafetensorsSource, WeightSource


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
        return SafetensorsSource(self.directory, dtype, device, progress, self.config.quantised)


def resolve_model(model: str | Path, load_format: str = "auto", revision: str | None = None) -> ModelSource:
    """Finds the model. Raises the errors of `locate_model`."""
    found = locate_model(model, load_format, revision)
    return ModelSource(found.name, found.config, found.directory, found.is_dummy)
