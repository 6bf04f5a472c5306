"""A model as it was asked for: a checkpoint's directory, or a preset with made-up weights."""

from __future__ import annotations

from pathlib import Path

import torch

from alignedserve.models.config import ModelConfig
from alignedserve.models.dummy_weights import DummySource
from alignedserve.models.hf_config import load_model_config
from alignedserve.models.weights import SafetensorsSource, WeightSource


class Checkpoint:
    def __init__(self, directory: Path, load_format: str) -> None:
        self.directory = directory
        self.model_config: ModelConfig = load_model_config(directory)
        self._load_format = load_format

    def weights(self, dtype: torch.dtype, device: torch.device, seed: int, progress: bool) -> WeightSource:
        if self._load_format == "dummy":
            return DummySource(dtype, device, seed)
        return SafetensorsSource(self.directory, dtype, device, progress)
