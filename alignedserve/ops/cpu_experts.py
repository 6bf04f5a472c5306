"""Mixtures of experts on a CPU: packs their weights, and records the operations of a program that run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from alignedserve.kernels.cpu.arena import Arena
from alignedserve.kernels.cpu.experts import ExpertPacker, PackParts, RoutingBuffers
from alignedserve.kernels.cpu.program import Buffers, Program, Value
from alignedserve.kernels.cpu.structs import (
    ActivationCode,
    ExpertLinearOp,
    LinearOp,
    OpKind,
    RouteOp,
    SpreadOp,
)
from alignedserve.kernels.cpu.weights import PackedExperts, PackedWeight
from alignedserve.ops.experts import ClampedSwiglu, ExpertsSpec, TakeExpert, taken


@dataclass(frozen=True)
class CpuExperts:
    spec: ExpertsSpec
    gate_up: PackedExperts
    down: PackedExperts


def pack_experts(
    spec: ExpertsSpec, take: TakeExpert, pack_gated: PackParts, pack: PackParts, arena: Arena
) -> CpuExperts:
    gate_up = ExpertPacker(spec.num_experts, pack_gated, arena)
    down = ExpertPacker(spec.num_experts, pack, arena)
    for expert in taken(spec, take):
        gate_up.add([expert.gate, expert.up], expert.gate_up_biases)
        down.add([expert.down], expert.down_biases)
    return CpuExperts(spec, gate_up.finish(), down.finish())


# Appends the operation that quantises values to eight-bit rows for this weight. The number is rows per row of the step.
QuantiseRows = Callable[[Value, PackedWeight, int], Value]


class ExpertRecorder:
    """Appends the operations of a mixture to a program with values of at most `num_rows` rows."""

    def __init__(self, program: Program, dtype: torch.dtype, num_rows: int, quantise: QuantiseRows) -> None:
        self._program = program
        self._quantise = quantise
        self._dtype = dtype
        self._num_rows = num_rows
        # By (number of experts, experts per row). Layers use them one after the other.
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
        x = self._as_taken(x, experts.gate_up, 1)
        inner = self._linear(
            self._spread(x, routing, buffers), experts.gate_up, routing, buffers, self._dtype, spec.swiglu
        )
        inner = self._as_taken(inner, experts.down, spec.top_k)
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

    def _as_taken(self, x: Value, weight: PackedExperts, rows_each: int) -> Value:
        """Quantises the rows to eight bits if the weight needs that."""
        return self._quantise(x, weight.first, rows_each) if weight.first.kind.takes_codes else x

    def _spread(self, x: Value, routing: RoutingBuffers, buffers: Buffers) -> Value:
        """Copies each row once for each of its experts."""
        spread = Value(buffers, x.width, x.tensor.dtype, x.rows)
        # Eight-bit rows are whole words of four bytes, scales included, and are copied as words.
        dtype = torch.float32 if x.tensor.dtype is torch.uint8 else self._dtype
        values_each = dtype.itemsize // x.tensor.dtype.itemsize
        args = SpreadOp(
            routing=routing.struct,
            x=x.pointer,
            out=spread.pointer,
            width=x.width // values_each,
            x_stride=x.stride // values_each,
            out_stride=spread.stride // values_each,
        )
        self._program.append(OpKind.SPREAD, dtype, args, spread, [x, routing])
        return spread

    def _linear(
        self,
        x: Value,
        weight: PackedExperts,
        routing: RoutingBuffers,
        buffers: Buffers,
        dtype: torch.dtype,
        swiglu: ClampedSwiglu | None = None,
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
            weight_kind=first.kind,
        )
        if swiglu:
            linear.activation = ActivationCode.CLAMPED_SWIGLU
            linear.swiglu_alpha, linear.swiglu_limit = swiglu.alpha, swiglu.limit
        if weight.biases is not None:
            linear.bias = weight.biases.data_ptr()
        if weight.int8:
            linear.scales, linear.starts = weight.int8.scales.data_ptr(), weight.int8.starts.data_ptr()
        if first.groups:
            linear.group = first.groups.values
            linear.float_scales, linear.has_zeros = first.groups.has_float_scales, first.groups.has_zeros
        args = ExpertLinearOp(routing.struct, linear, weight.expert_bytes, weight.expert_columns)
        self._program.append(OpKind.EXPERT_LINEAR, self._dtype, args, out, [x, weight, routing])
        return out
