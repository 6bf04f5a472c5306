"""Lists what a model would take, without reading or making any of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from alignedserve.models.config import ModelConfig
from alignedserve.models.registry import build_model
from alignedserve.models.weights import SafetensorsSource
from alignedserve.ops.base import Activation
from alignedserve.ops.experts import ExpertsSpec, TakeExpert
from alignedserve.ops.torch_experts import TorchExperts
from alignedserve.ops.torch_ops import TorchLinear, TorchOps


class ListedSource:
    """A WeightSource of shapes. With a checkpoint, it only checks that the checkpoint has the tensors."""

    def __init__(self, dtype: torch.dtype, checkpoint: SafetensorsSource | None) -> None:
        self.num_values = 0
        self._dtype = dtype
        self._checkpoint = checkpoint

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self._checkpoint is not None:
            self._checkpoint.expect(name, shape)
        self.num_values += math.prod(shape)
        # This takes one value's memory, whatever its shape.
        return torch.empty(1, dtype=self._dtype).expand(shape)

    def finish(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.finish()


class ListingOps(TorchOps):
    """Ops which keep nothing of what they are given."""

    def linear_weight(
        self,
        parts: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor] | None = None,
        activation: Activation = Activation.NONE,
    ) -> TorchLinear:
        return TorchLinear(parts[0], None, activation)

    def expert_weights(self, spec: ExpertsSpec, take: TakeExpert) -> TorchExperts:
        experts = [take(number) for number in range(spec.num_experts)]
        return TorchExperts(spec, experts[0].gate, experts[0].down)

    def parameter(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


def num_weights(config: ModelConfig, dtype: torch.dtype, checkpoint: SafetensorsSource | None) -> int:
    """The number of values in all of the model's tensors. Raises ValueError when the checkpoint is not the model's."""
    listed = ListedSource(dtype, checkpoint)
    # The length of sequences makes no difference to the weights.
    build_model(config, listed, ListingOps(dtype), max_model_len=1)
    listed.finish()
    return listed.num_values
