"""One row through a linear layer, as fast as its weights can be read, with the operations around it in the same pass.

    out = activation(norm(x) @ weight.T + bias) + residual

norm: RMS norm with weight `norm`, if given. Gated activation: the weight's upper half is the gate, its lower half up,
out = silu(gate) * up, or gelu(gate) * up. x [in], weight [out, in] (contiguous, or in codes: coded_weight.py), out
[out]. Sums in float32.

Grid: (outputs / ROWS,). A program starts to load its first piece of weights before the previous kernel has ended:
weights depend on no kernel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from alignedserve.kernels.triton.coded_weight import PACKED, CodedWeight, constants_of, load_piece, tensors_of
from alignedserve.kernels.triton.launch import dependent_launch, start_dependents, wait_for_dependency

NONE, RELU, GELU, GELU_TANH, SILU_GATED, GELU_TANH_GATED = range(6)
ACTIVATIONS = {
    "none": NONE,
    "relu": RELU,
    "gelu": GELU,
    "gelu_tanh": GELU_TANH,
    "silu": SILU_GATED,
    "gelu_tanh_gated": GELU_TANH_GATED,
}


@dataclass(frozen=True)
class GemvTuning:
    """The outputs of a program, the inputs that it reads at a time, and its warps."""

    rows: int
    chunk: int
    num_warps: int
    num_stages: int


def gemv_tuning(num_in: int, num_out: int, is_gated: bool) -> GemvTuning:
    """Returns the fastest tuning on an H200."""
    if is_gated:
        return GemvTuning(rows=2, chunk=4096, num_warps=8, num_stages=1)
    if num_in > 8192 or num_out > 32768:
        return GemvTuning(rows=4, chunk=1024, num_warps=4, num_stages=3)
    if num_out > 4096:
        return GemvTuning(rows=4, chunk=1024, num_warps=8, num_stages=1)
    return GemvTuning(rows=8, chunk=512, num_warps=8, num_stages=1)


def coded_gemv_tuning(weight: CodedWeight, is_gated: bool) -> GemvTuning:
    """Not measured so far. A thread reads 16 bytes of a piece, and equally many of a gated layer's other half."""
    rows = 2 if is_gated else 4
    num_codes = 8192 if weight.format >= PACKED else 4096
    return GemvTuning(rows, num_codes // rows, num_warps=8, num_stages=3)


def gemv(
    x: torch.Tensor,
    weight: torch.Tensor | CodedWeight,
    out: torch.Tensor,
    tuning: GemvTuning,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    activation: int = NONE,
) -> torch.Tensor:
    num_in = x.numel()
    is_gated = activation in (SILU_GATED, GELU_TANH_GATED)
    num_out = weight.shape[0] // 2 if is_gated else weight.shape[0]
    codes, scales, zeros = tensors_of(weight)
    if len(weight.shape) != 2 or weight.shape[1] != num_in or not codes.is_contiguous():
        raise ValueError(f"weight must be contiguous [outputs, {num_in}], not {tuple(weight.shape)}")
    for name, tensor, size in (
        ("out", out, num_out),
        ("residual", residual, num_out),
        ("norm", norm, num_in),
    ):
        if tensor is not None and tensor.numel() != size:
            raise ValueError(f"{name} must hold {size} numbers, not {tensor.numel()}")
    if is_gated and bias is not None:
        raise ValueError("a gated layer has no bias")
    _gemv_kernel[(triton.cdiv(num_out, tuning.rows),)](
        x,
        codes,
        scales,
        zeros,
        bias,
        residual,
        norm,
        out,
        norm_eps,
        NUM_IN=num_in,
        NUM_OUT=num_out,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None,
        HAS_NORM=norm is not None,
        ROWS=tuning.rows,
        CHUNK=tuning.chunk,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        **constants_of(weight),
        **dependent_launch(),
    )
    return out


@triton.jit
def _gemv_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    residual,
    norm,
    out,
    norm_eps,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    HAS_NORM: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ALIKE: tl.constexpr,
    PDL: tl.constexpr,
):
    GATED: tl.constexpr = ACTIVATION >= 4
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < NUM_OUT
    first = load_piece(weight, scales, zeros, row, is_row, 0, NUM_IN, CHUNK, FORMAT, GROUP, ALIKE)
    if GATED:
        second = load_piece(
            weight, scales, zeros, row, is_row, 0, NUM_IN, CHUNK, FORMAT, GROUP, ALIKE, NUM_OUT
        )
    wait_for_dependency(PDL)
    start_dependents(PDL)
    value, squares = _load_x(x, norm, tl.arange(0, CHUNK), NUM_IN, HAS_NORM)
    acc = first.to(tl.float32) * value[None, :]
    if GATED:
        acc_up = second.to(tl.float32) * value[None, :]
    for start in tl.range(CHUNK, NUM_IN, CHUNK, num_stages=STAGES):
        piece = load_piece(weight, scales, zeros, row, is_row, start, NUM_IN, CHUNK, FORMAT, GROUP, ALIKE)
        value, more_squares = _load_x(x, norm, start + tl.arange(0, CHUNK), NUM_IN, HAS_NORM)
        squares += more_squares
        acc += piece.to(tl.float32) * value[None, :]
        if GATED:
            piece_up = load_piece(
                weight, scales, zeros, row, is_row, start, NUM_IN, CHUNK, FORMAT, GROUP, ALIKE, NUM_OUT
            )
            acc_up += piece_up.to(tl.float32) * value[None, :]
    result = tl.sum(acc, 1)
    if HAS_NORM:
        shrink = tl.rsqrt(tl.sum(squares, 0) / NUM_IN + norm_eps)
        result *= shrink
    if GATED:
        up = tl.sum(acc_up, 1)
        if HAS_NORM:
            up *= shrink
        result = gelu_tanh(result) * up if ACTIVATION == 5 else result * tl.sigmoid(result) * up
    if HAS_BIAS:
        result += tl.load(bias + row, mask=is_row, other=0.0).to(tl.float32)
    if ACTIVATION == 1:
        result = tl.maximum(result, 0.0)
    if ACTIVATION == 2:
        result = 0.5 * result * (1.0 + tl.erf(result * 0.7071067811865476))
    if ACTIVATION == 3:
        result = gelu_tanh(result)
    if HAS_RESIDUAL:
        result += tl.load(residual + row, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty), mask=is_row)


@triton.jit
def gelu_tanh(x):
    # tanh(z) = 2 sigmoid(2z) - 1
    return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _load_x(x, norm, column, NUM_IN: tl.constexpr, HAS_NORM: tl.constexpr):
    """Returns a part of x, times the norm's weights, and its squares."""
    is_in = column < NUM_IN
    value = tl.load(x + column, mask=is_in, other=0.0).to(tl.float32)
    squares = value * value
    if HAS_NORM:
        value *= tl.load(norm + column, mask=is_in, other=0.0).to(tl.float32)
    return value, squares


def gemv_torch(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    norm_eps: float = 0.0,
    activation: int = NONE,
) -> torch.Tensor:
    """The reference, in float64."""
    value = x.double()
    if norm is not None:
        value = value * torch.rsqrt(value.square().mean() + norm_eps) * norm.double()
    result = weight.double() @ value
    if bias is not None:
        result = result + bias.double()
    if activation == RELU:
        result = result.relu()
    elif activation == GELU:
        result = torch.nn.functional.gelu(result)
    elif activation == GELU_TANH:
        result = torch.nn.functional.gelu(result, approximate="tanh")
    elif activation == SILU_GATED:
        gate, up = result.chunk(2)
        result = torch.nn.functional.silu(gate) * up
    elif activation == GELU_TANH_GATED:
        gate, up = result.chunk(2)
        result = torch.nn.functional.gelu(gate, approximate="tanh") * up
    return result if residual is None else result + residual.double()
