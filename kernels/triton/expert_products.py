"""The two products of a mixture of experts. Each computes all experts in one launch.

    gate_up   hidden[place] = silu(x[row] @ gate.T) * (x[row] @ up.T), by the expert at `place`
    down      each[choice] = hidden[place] @ down.T, in float32

Shapes and dtypes: experts.py. Weights in codes become values of x's dtype in registers (coded_weight.py), once for each
tile of rows.

Tiles. Each expert's choices are cut into tiles of ROWS. A tile belongs to one expert. Only the device knows their
number; the host knows the bound

    max_tiles = most_hit + (choices - most_hit) // ROWS,  most_hit = min(choices, experts)

An expert that is hit has a first tile, and another one for each ROWS choices after its first choice. max_tiles programs
are launched, and those without a tile return at once. A program finds its tile's expert by adding up `counts`, 4 bytes
per expert, so no other kernel has to make a table. Grids depend only on the number of rows, and nothing waits for the
device, so a CUDA graph can capture all of it.

Grids: gate_up (max_tiles, inner / OUTPUTS), down (max_tiles, hidden / OUTPUTS).
Tiles are the first dimension, so that two tiles of one expert read its weights at about the same time, and memory is
read once.

Arithmetic for Qwen3-30B-A3B (128 experts, 8 per row, hidden 2048, inner 768, bfloat16) on 132 SMs:

    an expert   3 * 2048 * 768 * 2 bytes = 9.4 MB; a layer's 8 are 75 MB, 18 us at 4.2 TB/s
    batch 1     8 tiles; with OUTPUTS = 32, gate_up has 8 * 24 = 192 programs and down 8 * 64 = 512. A step of the
                loop reads (2 * 32 + 16) * 128 * 2 = 20 KB; while one is computed, three are in flight or loaded: 60
                KB, so three programs fit an SM, and all 192 run at once. 4.2 TB/s at 0.7 us need 22 KB in flight to
                each SM; one program has 48 KB of weights. down holds 36 KB: six fit, and all 512 run at once
    batch 32    256 choices hit 128 * (1 - (15/16)^32) = 112 experts: 1.05 GB, 250 us; of the 136 launched tiles,
                about 24 are empty
    batch 256   2048 choices, 16 per expert: all weights, 1.2 GB, 288 us; sums are 19 GFLOP, 30 us at 650 TFLOP/s
    one row     takes part in a matrix instruction with 15 rows of zeros: free while weights take longer
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from alignedserve.kernels.triton.coded_weight import CodedWeight, constants_of, load_piece, tensors_of
from alignedserve.kernels.triton.expert_route import ExpertRouting
from alignedserve.kernels.triton.launch import dependent_launch, start_dependents, wait_for_dependency

# A layer of all experts: [expert, out, in], or in codes, [experts * out, in].
ExpertWeights = torch.Tensor | CodedWeight
# The biases of gate_up and of down.
Biases = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ExpertTuning:
    """The rows, outputs and inner values of a tile, warps, and loop steps that are loaded at a time."""

    rows: int
    outputs: int
    inner: int
    num_warps: int
    num_stages: int


def expert_tuning(
    num_choices: int, num_experts: int, value_bytes: int, is_coded: bool = False
) -> ExpertTuning:
    """With few choices per expert, reading weights is the limit; with many, matrix instructions. Not measured so far.

    Codes of equally many weights are fewer bytes, so more steps are loaded at a time. In float32, only half as many of
    their values fit the registers.
    """
    inner, num_stages = 256 // value_bytes, 6 if is_coded else 4
    if is_coded and value_bytes == 4:
        inner //= 2
    if num_choices <= 16 * num_experts:
        return ExpertTuning(16, 32, inner, 4, num_stages)
    if num_choices <= 64 * num_experts or value_bytes == 4:
        return ExpertTuning(32, 32, inner, 4, num_stages)
    return ExpertTuning(128, 64, inner // 2, 8, 3)


def max_tiles(num_choices: int, num_experts: int, rows: int) -> int:
    most_hit = min(num_choices, num_experts)
    return most_hit + (num_choices - most_hit) // rows


def expert_products(
    x: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    routing: ExpertRouting,
    tuning: ExpertTuning,
    biases: Biases | None = None,
    swiglu: tuple[float, float] | None = None,
) -> torch.Tensor:
    """Returns float32 [choices, hidden], not yet multiplied by the choices' weights."""
    num_experts, num_choices = len(routing.counts), len(routing.order)
    hidden, inner = x.shape[1], down.shape[-1]
    values = x.new_empty(num_choices, inner)
    each = torch.empty(num_choices, hidden, dtype=torch.float32, device=x.device)
    tiles = max_tiles(num_choices, num_experts, tuning.rows)
    common = {
        "NUM_EXPERTS": num_experts,
        "EXPERTS_UP": triton.next_power_of_2(num_experts),
        "TOP_K": routing.chosen.shape[1],
        "ROWS": tuning.rows,
        "OUTPUTS": tuning.outputs,
        "INNER": tuning.inner,
        "STAGES": tuning.num_stages,
        "num_warps": tuning.num_warps,
        **dependent_launch(),
    }
    _gate_up_kernel[(tiles, triton.cdiv(inner, tuning.outputs))](
        x,
        *tensors_of(gate_up),
        biases and biases[0],
        routing.order,
        routing.counts,
        values,
        NUM_IN=hidden,
        NUM_OUT=inner,
        IS_CLAMPED=swiglu is not None,
        ALPHA=swiglu[0] if swiglu else 1.0,
        LIMIT=swiglu[1] if swiglu else 0.0,
        **constants_of(gate_up),
        **common,
    )
    _down_kernel[(tiles, triton.cdiv(hidden, tuning.outputs))](
        values,
        *tensors_of(down),
        biases and biases[1],
        routing.order,
        routing.counts,
        each,
        NUM_IN=inner,
        NUM_OUT=hidden,
        **constants_of(down),
        **common,
    )
    return each


@triton.jit
def _places_of(counts, tile, NUM_EXPERTS: tl.constexpr, EXPERTS_UP: tl.constexpr, ROWS: tl.constexpr):
    """Returns a tile's expert, its first place, and the end of the expert's places. The end is not after the first
    place if the tile does not exist."""
    expert = tl.arange(0, EXPERTS_UP)
    count = tl.load(counts + expert, expert < NUM_EXPERTS, other=0)
    num_tiles = (count + ROWS - 1) // ROWS
    found = tl.sum((tl.cumsum(num_tiles, 0) <= tile).to(tl.int32), 0)
    first = tl.sum(tl.where(expert < found, count, 0), 0)
    first_tile = tl.sum(tl.where(expert < found, num_tiles, 0), 0)
    end = first + tl.sum(tl.where(expert == found, count, 0), 0)
    return found, first + (tile - first_tile) * ROWS, end


@triton.jit
def _gate_up_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    order,
    counts,
    out,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    IS_CLAMPED: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ALIKE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_dependency(PDL)
    start_dependents(PDL)
    expert, first, end = _places_of(counts, tl.program_id(0), NUM_EXPERTS, EXPERTS_UP, ROWS)
    if first >= end:
        return
    place = first + tl.arange(0, ROWS)
    is_row = place < end
    row = tl.load(order + place, is_row, other=0) // TOP_K
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < NUM_OUT
    column = tl.arange(0, INNER)
    x_at = x + row.to(tl.int64)[:, None] * NUM_IN + column[None, :]
    gate_row = expert * (2 * NUM_OUT) + output
    gate = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, NUM_IN, INNER, num_stages=STAGES):
        is_in = (start + column < NUM_IN)[None, :]
        rows = tl.load(x_at + start, is_row[:, None] & is_in, other=0.0).T
        of_gate = load_piece(
            weight, scales, zeros, gate_row, is_output, start, NUM_IN, INNER, FORMAT, GROUP, ALIKE
        )
        gate = tl.dot(of_gate.to(rows.dtype), rows, gate, input_precision="ieee")
        of_up = load_piece(
            weight, scales, zeros, gate_row, is_output, start, NUM_IN, INNER, FORMAT, GROUP, ALIKE, NUM_OUT
        )
        up = tl.dot(of_up.to(rows.dtype), rows, up, input_precision="ieee")
    if bias is not None:
        bias_at = bias + expert * (2 * NUM_OUT) + output
        gate += tl.load(bias_at, is_output, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_at + NUM_OUT, is_output, other=0.0).to(tl.float32)[:, None]
    if IS_CLAMPED:
        # A minimum would return a number if the other side is NaN.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    value = (gate / (1.0 + tl.exp(-ALPHA * gate)) * up).T
    at = place.to(tl.int64)[:, None] * NUM_OUT + output[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), is_row[:, None] & is_output[None, :])


@triton.jit
def _down_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    order,
    counts,
    out,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    TOP_K: tl.constexpr,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ALIKE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_dependency(PDL)
    start_dependents(PDL)
    expert, first, end = _places_of(counts, tl.program_id(0), NUM_EXPERTS, EXPERTS_UP, ROWS)
    if first >= end:
        return
    place = first + tl.arange(0, ROWS)
    is_row = place < end
    choice = tl.load(order + place, is_row, other=0)
    output = tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    is_output = output < NUM_OUT
    column = tl.arange(0, INNER)
    x_at = x + place.to(tl.int64)[:, None] * NUM_IN + column[None, :]
    weight_row = expert * NUM_OUT + output
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, NUM_IN, INNER, num_stages=STAGES):
        is_in = (start + column < NUM_IN)[None, :]
        rows = tl.load(x_at + start, is_row[:, None] & is_in, other=0.0).T
        piece = load_piece(
            weight, scales, zeros, weight_row, is_output, start, NUM_IN, INNER, FORMAT, GROUP, ALIKE
        )
        acc = tl.dot(piece.to(rows.dtype), rows, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + expert * NUM_OUT + output, is_output, other=0.0).to(tl.float32)[:, None]
    at = choice.to(tl.int64)[:, None] * NUM_OUT + output[None, :]
    tl.store(out + at, acc.T, is_row[:, None] & is_output[None, :])
