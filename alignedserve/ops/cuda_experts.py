"""The weights of a mixture of experts as the kernels of a GPU read them: one expert after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.ops.experts import ExpertsSpec, TakeExpert, check_expert


@dataclass(frozen=True)
class CudaExperts:
    spec: ExpertsSpec
    # [expert, gate's and then up's outputs, hidden]
    gate_up: torch.Tensor
    # [expert, hidden, inner]
    down: torch.Tensor


def stack_experts(
    spec: ExpertsSpec, take: TakeExpert, dtype: torch.dtype, device: torch.device
) -> CudaExperts:
    num, inner, hidden = spec.num_experts, spec.intermediate_size, spec.hidden_size
    gate_up = torch.empty(num, 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(num, hidden, inner, dtype=dtype, device=device)
    for number in range(num):
        expert = take(number)
        check_expert(spec, expert)
        gate_up[number, :inner].copy_(expert.gate)
        gate_up[number, inner:].copy_(expert.up)
        down[number].copy_(expert.down)
    return CudaExperts(spec, gate_up, down)
