"""The weights of a mixture of experts as the kernels of a GPU read them: one expert after another."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.ops.experts import Expert, ExpertsSpec, TakeExpert, check_expert
from alignedserve.ops.quantise import QuantisedWeight


@dataclass(frozen=True)
class CudaExperts:
    spec: ExpertsSpec
    # [expert, gate's and then up's outputs, hidden]
    gate_up: torch.Tensor
    # [expert, hidden, inner]
    down: torch.Tensor
    # [expert, gate's and then up's outputs] and [expert, hidden], if experts have biases
    biases: tuple[torch.Tensor, torch.Tensor] | None = None


def stack_experts(
    spec: ExpertsSpec, take: TakeExpert, dtype: torch.dtype, device: torch.device
) -> CudaExperts:
    num, inner, hidden = spec.num_experts, spec.intermediate_size, spec.hidden_size
    gate_up = torch.empty(num, 2 * inner, hidden, dtype=dtype, device=device)
    down = torch.empty(num, hidden, inner, dtype=dtype, device=device)
    biases: list[list[torch.Tensor]] = []
    for number in range(num):
        expert = take(number)
        check_expert(spec, expert)
        for part, into in (
            (expert.gate, gate_up[number, :inner]),
            (expert.up, gate_up[number, inner:]),
            (expert.down, down[number]),
        ):
            if isinstance(part, QuantisedWeight):
                raise ValueError(f"experts in {part.kind} run on CPUs so far, not on a GPU")
            into.copy_(part)
        biases.append(_biases(expert))
    stacked = [torch.stack([*each]).to(device, dtype) for each in zip(*biases, strict=True)]
    return CudaExperts(spec, gate_up, down, (stacked[0], stacked[1]) if stacked else None)


def _biases(expert: Expert) -> list[torch.Tensor]:
    """Of gate and up, and of down; none if it has none."""
    of_gate_up, of_down = expert.gate_up_biases, expert.down_bias
    return [] if of_gate_up is None or of_down is None else [torch.cat(of_gate_up), of_down.clone()]
