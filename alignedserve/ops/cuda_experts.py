"""The weights of a mixture of experts in the layout of the GPU's kernels: one expert after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from alignedserve.kernels.quantised import side_by_side
from alignedserve.kernels.triton.coded_weight import CodedWeight, tensors_of
from alignedserve.kernels.triton.expert_products import Biases, ExpertWeights
from alignedserve.ops.experts import Expert, ExpertsSpec, TakeExpert, taken
from alignedserve.ops.quantise import Part, plain_parts, quantised_parts, without_blocks


@dataclass(frozen=True)
class CudaExperts:
    spec: ExpertsSpec
    # For each expert, the outputs of gate and then those of up.
    gate_up: ExpertWeights
    down: ExpertWeights
    # [expert, outputs of gate and then of up] and [expert, hidden], if experts have biases
    biases: Biases | None = None


def stack_experts(
    spec: ExpertsSpec, take: TakeExpert, scheme: str | None, dtype: torch.dtype, device: torch.device
) -> CudaExperts:
    """`scheme`: how floats are quantised; None: they stay in `dtype`."""
    gate_up, down = (_Stack(spec.num_experts, scheme, dtype, device) for _ in range(2))
    biases: list[list[torch.Tensor]] = []
    for expert in taken(spec, take):
        gate_up.add([expert.gate, expert.up])
        down.add([expert.down])
        biases.append(_biases(expert))
    stacked = [torch.stack([*each]).to(device, dtype) for each in zip(*biases, strict=True)]
    return CudaExperts(spec, gate_up.weights, down.weights, (stacked[0], stacked[1]) if stacked else None)


class _Stack:
    """Copies the same layer of one expert after the other into memory for all of them."""

    def __init__(
        self, num_experts: int, scheme: str | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_experts = num_experts
        self._scheme = scheme
        self._dtype = dtype
        self._device = device
        # Outputs of all experts.
        self._rows: torch.Tensor | CodedWeight | None = None
        self._num_added = 0

    def add(self, parts: Sequence[Part]) -> None:
        weight: torch.Tensor | CodedWeight
        parts = without_blocks(parts, self._dtype)
        if coded := quantised_parts(parts, self._scheme, self._dtype):
            weight = CodedWeight.of(side_by_side(coded), self._device)
        else:
            weight = torch.cat([part.to(self._device, self._dtype) for part in plain_parts(parts)])
        # All experts have the form of the first one.
        if self._rows is None:
            self._rows = _room_for(self._num_experts, weight)
        first = self._num_added * weight.shape[0]
        for into, tensor in zip(tensors_of(self._rows), tensors_of(weight), strict=True):
            if into is not None and tensor is not None:
                into[first : first + len(tensor)] = tensor
        self._num_added += 1

    @property
    def weights(self) -> ExpertWeights:
        assert self._rows is not None
        if isinstance(self._rows, CodedWeight):
            return self._rows
        return self._rows.view(self._num_experts, -1, self._rows.shape[1])


def _room_for(num_experts: int, weight: torch.Tensor | CodedWeight) -> torch.Tensor | CodedWeight:
    if isinstance(weight, CodedWeight):
        return weight.room_for(num_experts)
    return weight.new_empty(num_experts * len(weight), weight.shape[1])


def _biases(expert: Expert) -> list[torch.Tensor]:
    """Biases of gate and up together, and of down; empty without biases. With several ranks, only one has the biases
    of down, and the others have zeros."""
    of_gate_up, of_down = expert.gate_up_biases, expert.down_bias
    if of_gate_up is None:
        return []
    if of_down is None:
        of_down = of_gate_up[0].new_zeros(expert.down.shape[0])
    return [torch.cat(of_gate_up), of_down.clone()]
