"""Mixtures of experts on a CPU: how they are packed, and the operations of a program that run them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.kernels.cpu.arena import Arena
from alignedserve.kernels.cpu.experts import ExpertPacker, PackedExperts, RoutingBuffers
from alignedserve.kernels.cpu.program import Buffers, Program, Value
from alignedserve.kernels.cpu.structs import (
    ActivationCode,
    ExpertLinearOp,
    LinearOp,
    OpKind,
    RouteOp,
    SpreadOp,
)
from alignedserve.ops.experts import ExpertsSpec, TakeExpert, check_expert


@dataclass(frozen=True)
class CpuExperts:
    spec: ExpertsSpec
    gate_up: PackedExperts
    down: PackedExperts


def pack_experts(spec: ExpertsSpec, take: TakeExpert, dtype: torch.dtype, arena: Arena) -> CpuExperts:
    gate_up = ExpertPacker(spec.num_experts, ActivationCode.SILU_GATED, dtype, arena)
    down = ExpertPacker(spec.num_experts, ActivationCode.NONE, dtype, arena)
    for number in range(spec.num_experts):
        expert = take(number)
        check_expert(spec, expert)
        gate_up.add([expert.gate, expert.up])
        down.add([expert.down])
    return CpuExperts(spec, gate_up.finish(), down.finish())


class ExpertRecorder:
    """Appends the operations of a mixture to a program whose values have at most `num_rows` rows."""

    def __init__(self, program: Program, dtype: torch.dtype, num_rows: int) -> None:
        self._program = program
        self._dtype = dtype
        self._num_rows = num_rows
        # By the number of experts and of those that a row chooses: layers use them one after the other.
        self._routings: dict[tuple[int, int], RoutingBuffers] = {}
        self._buffers: dict[int, Buffers] = {}

    def record(
        self, x: Value, logits: Value, experts: CpuExperts, residual: Value | None, out: Value
    ) -> None:
        spec = experts.spec
        buffers = self._buffers.setdefault(spec.top_k, Buffers(self._num_rows * spec.top_k))
        routing = self._routings.setdefault(
            (spec.num_experts, spec.top_k), RoutingBuffers(self._num_rows, spec.num_experts, spec.top_k)
        )
        route = RouteOp(routing.struct, logits.pointer, logits.stride, spec.normalises)
        self._program.append(OpKind.ROUTE, self._dtype, route, logits, [routing])
        self._program.append(OpKind.GROUP, self._dtype, route, logits, [routing])
        spread = Value(buffers, spec.hidden_size, self._dtype, x.rows)
        args = SpreadOp(
            routing=routing.struct,
            x=x.pointer,
            out=spread.pointer,
            width=x.width,
            x_stride=x.stride,
            out_stride=spread.stride,
        )
        self._program.append(OpKind.SPREAD, self._dtype, args, spread, [x, routing])
        inner = self._linear(spread, experts.gate_up, routing, buffers, self._dtype)
        each = self._linear(inner, experts.down, routing, buffers, torch.float32)
        args = SpreadOp(
            routing=routing.struct,
            x=each.pointer,
            out=out.pointer,
            width=out.width,
            x_stride=each.stride,
            out_stride=out.stride,
        )
        if residual is not None:
            args.residual, args.residual_stride = residual.pointer, residual.stride
        self._program.append(OpKind.MIX, self._dtype, args, out, [each, residual, routing])

    def _linear(
        self, x: Value, weight: PackedExperts, routing: RoutingBuffers, buffers: Buffers, dtype: torch.dtype
    ) -> Value:
        first = weight.first
        out = Value(buffers, first.out_features, dtype, x.rows)
        linear = LinearOp(
            x=x.pointer,
            weight=weight.tiles.data_ptr(),
            out=out.pointer,
            in_features=first.in_features,
            out_features=first.out_features,
            x_stride=x.stride,
            out_stride=out.stride,
            activation=first.activation,
            float32_out=dtype is torch.float32,
        )
        args = ExpertLinearOp(routing.struct, linear, weight.expert_bytes)
        self._program.append(OpKind.EXPERT_LINEAR, self._dtype, args, out, [x, weight, routing])
        return out
