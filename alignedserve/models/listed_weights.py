"""Computes a model's memory from shapes alone, without reading or making any weight."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from alignedserve.models.config import ModelConfig
from alignedserve.models.lora import with_adapters
from alignedserve.models.registry import build_model
from alignedserve.models.source import open_checkpoint
from alignedserve.models.weights import CheckpointSource, TakePart
from alignedserve.ops.adapters import LayerAdapters
from alignedserve.ops.base import BYTES_PER_WEIGHT, Activation
from alignedserve.ops.quantise import GgufWeight, Part, block_runs, plain_parts, quantised_parts
from alignedserve.ops.shard import Shard, Split
from alignedserve.ops.torch_ops import TorchLinear, TorchOps


class ListedSource:
    """A WeightSource of shapes. With a checkpoint, it checks that the checkpoint has the tensors."""

    def __init__(self, dtype: torch.dtype, checkpoint: CheckpointSource[Any] | None) -> None:
        self._dtype = dtype
        self._checkpoint = checkpoint

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self._checkpoint is not None:
            self._checkpoint.expect(name, shape)
        # Takes one value's memory, whatever its shape.
        return torch.empty(1, dtype=self._dtype).expand(shape)

    def linear(self, layer: str, num_out: int, num_in: int) -> Part:
        if self._checkpoint is not None:
            return self._checkpoint.expect_linear(layer, num_out, num_in, self._dtype)
        return self.take(f"{layer}.weight", (num_out, num_in))

    def of_experts(self, layer: str, num_experts: int, num_out: int, num_in: int) -> TakePart:
        if self._checkpoint is not None:
            each = self._checkpoint.expect_of_experts(layer, num_experts, num_out, num_in, self._dtype)
        else:
            each = self.take(layer, (num_experts, num_in, num_out))[0].T
        return lambda number: each

    def finish(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.finish()


class ListingOps(TorchOps):
    """Ops that count bytes, and keep nothing."""

    def __init__(
        self, dtype: torch.dtype, quantization: str | None, shard: Shard | None = None, is_cpu: bool = True
    ) -> None:
        super().__init__(dtype, quantization=quantization)
        self.shard = shard or Shard()
        # Elsewhere GGUF's types become floats.
        self._is_cpu = is_cpu
        self.num_bytes = 0

    def linear_weight(
        self,
        parts: Sequence[Part],
        biases: Sequence[torch.Tensor] | None = None,
        activation: Activation = Activation.NONE,
        is_head: bool = False,
        split: Split = Split.NONE,
        num_outputs: int = 0,
    ) -> TorchLinear:
        # Quantised weights keep their own scheme.
        self.num_bytes += sum(part.num_bytes for part in quantised_parts(parts, None, self.dtype))
        are_kept = self._is_cpu and bool(block_runs(parts, activation.is_gated, self.dtype))
        are_mxfp4 = all(isinstance(part, GgufWeight) and part.is_mxfp4 for part in parts)
        for part in parts:
            if isinstance(part, GgufWeight):
                is_kept = are_kept or are_mxfp4
                self.num_bytes += part.num_bytes if is_kept else part.shape.numel() * self.dtype.itemsize
        scheme = self.scheme(is_head)
        self._count(plain_parts(parts), BYTES_PER_WEIGHT[scheme] if scheme else None)
        self._count(biases or ())
        return TorchLinear(torch.empty(0), None, activation)

    def with_adapters(self, weight: TorchLinear, adapters: LayerAdapters) -> TorchLinear:
        self.num_bytes += adapters.num_values * self.dtype.itemsize
        return weight

    def parameter(self, tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        self._count([tensor], dtype.itemsize if dtype else None)
        return tensor

    def _count(self, tensors: Sequence[torch.Tensor], each: float | None = None) -> None:
        """`each`: bytes per value, if not the dtype's."""
        self.num_bytes += round(sum(tensor.numel() for tensor in tensors) * (each or self.dtype.itemsize))


def check_files(config: ModelConfig, directory: Path, num_ranks: int) -> None:
    """Raises ValueError if the files in the directory do not have exactly the model's tensors."""
    checkpoint = open_checkpoint(directory, torch.float32, "cpu", config.quantised)
    num_weight_bytes(config, torch.float32, checkpoint, shard=Shard(0, num_ranks))


def check_adapters(config: ModelConfig, adapters: Sequence[tuple[str, str]], max_lora_rank: int) -> None:
    """Raises ValueError for the first adapter, as (name, path), that does not fit this model."""
    num_weight_bytes(config, torch.float32, None, adapters=adapters, max_lora_rank=max_lora_rank)


def num_weight_bytes(
    config: ModelConfig,
    dtype: torch.dtype,
    checkpoint: CheckpointSource[Any] | None,
    quantization: str | None = None,
    shard: Shard | None = None,
    adapters: Sequence[tuple[str, str]] = (),
    max_lora_rank: int = 0,
    num_adapter_places: int = 0,
    is_cpu: bool = True,
) -> int:
    """The bytes of all tensors that a model, or one rank's part of it, keeps. Raises ValueError if the checkpoint or an
    adapter does not fit the model. `adapters`: (name, path) of each. `num_adapter_places`: see NumberedAdapters."""
    ops = ListingOps(dtype, quantization, shard, is_cpu)
    listed = with_adapters(ListedSource(dtype, checkpoint), adapters, max_lora_rank, num_adapter_places)
    # The length of sequences makes no difference to the weights.
    build_model(config, listed, ops, max_model_len=1)
    listed.finish()
    return ops.num_bytes
