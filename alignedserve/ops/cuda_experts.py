"""The weights of a mixture of experts as the kernels of a GPU read them: one expert after another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from alignedserve.kernels.quantised import side_by_side
from alignedserve.kernels.triton.coded_weight import CodedWeight
from alignedserve.kernels.triton.expert_products import Biases, ExpertWeights
from alignedserve.ops.experts import Expert, ExpertsSpec, TakeExpert, check_expert
from alignedserve.ops.quantise import Part, plain_parts, quantised_parts


@dataclass(frozen=True)
class CudaExperts:
    spec: ExpertsSpec
    # Of each expert: gate's outputs and then up's.
    gate_up: ExpertWeights
    down: ExpertWeights
    # [expert, gate's and then up's outputs] and [expert, hidden], if experts have biases
    biases: Biases | None = None


def stack_experts(
    spec: ExpertsSpec, take: TakeExpert, scheme: str | None, dtype: torch.dtype, device: torch.device
) -> CudaExperts:
    """`scheme`: what is made of floats, if they do not stay in `dtype`."""
    gate_up, down = (_Stack(spec.num_experts, scheme, dtype, device) for _ in range(2))
    biases: list[list[torch.Tensor]] = []
    for number in range(spec.num_experts):
        expert = take(number)
        check_expert(spec, expert)
        gate_up.add([expert.gate, expert.up])
        down.add([expert.down])
        biases.append(_biases(expert))
    stacked = [torch.stack([*each]).to(device, dtype) for each in zip(*biases, strict=True)]
    return CudaExperts(
        spec, gate_up.weights(), down.weights(), (stacked[0], stacked[1]) if stacked else None
    )


class _Stack:
    """Copies the same layer of one expert after the other into memory for all of them."""

    def __init__(
        self, num_experts: int, scheme: str | None, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._num_experts = num_experts
        self._scheme = scheme
        self._dtype = dtype
        self._device = device
        self._num_added = 0
        # The first expert tells what it is like.
        self._weights: ExpertWeights | None = None

    def add(self, parts: Sequence[Part]) -> None:
        coded = quantised_parts(parts, self._scheme, self._dtype)
        if coded:
            self._add_coded(CodedWeight.of(side_by_side(coded), self._device))
        else:
            self._add_plain(plain_parts(parts))
        self._num_added += 1

    def _add_coded(self, weight: CodedWeight) -> None:
        if self._weights is None:
            self._weights = weight.room_for(self._num_experts)
        if isinstance(self._weights, torch.Tensor):
            raise ValueError(f"expert {self._num_added} is in {weight.kind}, those before it are not")
        first = self._num_added * weight.shape[0]
        try:
            self._weights.rows(first, first + weight.shape[0]).copy_(weight)
        except ValueError as error:
            raise ValueError(f"expert {self._num_added}: {error}") from None

    def _add_plain(self, parts: Sequence[torch.Tensor]) -> None:
        num_out = sum(map(len, parts))
        if self._weights is None:
            size = self._num_experts, num_out, parts[0].shape[1]
            self._weights = torch.empty(size, dtype=self._dtype, device=self._device)
        if isinstance(self._weights, CodedWeight):
            raise ValueError(f"expert {self._num_added} is not in {self._weights.kind}, those before it are")
        for part, into in zip(
            parts, self._weights[self._num_added].split([*map(len, parts)]), strict=True
        ):
            into.copy_(part)

    def weights(self) -> ExpertWeights:
        assert self._weights is not None
        return self._weights


def _biases(expert: Expert) -> list[torch.Tensor]:
    """Of gate and up, and of down; none if it has none. Of several ranks all but one have none of down: zeros."""
    of_gate_up, of_down = expert.gate_up_biases, expert.down_bias
    if of_gate_up is None:
        return []
    return [torch.cat(of_gate_up), of_gate_up[0].new_zeros(expert.down.shape[0]) if of_down is None else of_down.clone()]
