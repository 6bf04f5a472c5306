"""The weights of a layer's experts, in the layout that the kernels read, and the buffers of csrc/experts.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from alignedserve.kernels.cpu.arena import Arena
from alignedserve.kernels.cpu.structs import Routing
from alignedserve.kernels.cpu.weights import Int8Columns, PackedExperts, PackedWeight

# Packs the parts of a linear layer, and their biases if it has any, into memory of an arena.
PackParts = Callable[[Sequence[Any], Sequence[torch.Tensor] | None, Arena], PackedWeight]


class ExpertPacker:
    """Packs the same layer of one expert after the other, into memory that is reserved for all of them."""

    def __init__(self, num_experts: int, pack: PackParts, arena: Arena) -> None:
        self._num_experts = num_experts
        self._pack = pack
        self._arena = arena
        self._tiles = torch.empty(0, dtype=torch.uint8)
        self._packed: list[PackedWeight] = []

    def add(self, parts: Sequence[Any], biases: Sequence[torch.Tensor] | None = None) -> None:
        self._packed.append(self._pack(parts, biases, _Region(self._reserve)))

    def finish(self) -> PackedExperts:
        if len(self._packed) != self._num_experts:
            raise RuntimeError(f"{len(self._packed)} experts were packed, there are {self._num_experts}")
        columns = [each.int8 for each in self._packed if each.int8]
        int8 = Int8Columns.joined(columns) if columns else None
        biases = [each.bias for each in self._packed if each.bias is not None]
        return PackedExperts(
            self._tiles, self._packed[0], self._num_experts, int8, torch.cat(biases) if biases else None
        )

    def _reserve(self, num_bytes: int) -> torch.Tensor:
        """Returns the next expert's memory. All experts have the same shape, so the first one's size determines the
        total."""
        if not self._packed:
            self._tiles = self._arena.allocate(self._num_experts * num_bytes)
        start = len(self._packed) * num_bytes
        return self._tiles[start : start + num_bytes]


class _Region(Arena):
    """Hands out memory that was allocated before."""

    def __init__(self, reserve: Callable[[int], torch.Tensor]) -> None:
        self._reserve = reserve

    def allocate(self, num_bytes: int) -> torch.Tensor:
        return self._reserve(num_bytes)


class RoutingBuffers:
    """The experts of each of `num_rows` rows."""

    def __init__(self, num_rows: int, num_experts: int, top_k: int) -> None:
        num_choices = num_rows * top_k
        self._chosen = torch.zeros(num_choices, dtype=torch.int32)
        self._weights = torch.zeros(num_choices, dtype=torch.float32)
        self._places = torch.zeros(num_choices, dtype=torch.int32)
        self._hit = torch.zeros(num_experts + 1, dtype=torch.int32)
        self._starts = torch.zeros(num_experts + 1, dtype=torch.int32)
        self._shape = num_experts, top_k

    @property
    def struct(self) -> Routing:
        num_experts, top_k = self._shape
        return Routing(
            num_experts=num_experts,
            top_k=top_k,
            chosen=self._chosen.data_ptr(),
            weights=self._weights.data_ptr(),
            places=self._places.data_ptr(),
            hit=self._hit.data_ptr(),
            starts=self._starts.data_ptr(),
        )
