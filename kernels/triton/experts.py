"""A mixture of experts: the linear layers of many experts in one launch each.

    gate_up   hidden[place] = silu(x[row] @ gate.T) * (x[row] @ up.T), of the expert that stands at `place`
    down      each[choice] = hidden[place] @ down.T, in float32
    combine   out[row] = residual[row] + sum of weight * each, over the row's choices, the first choice first

Sums may have biases, and the clamped SwiGLU may be in place of silu(gate) * up (gpt-oss).

x, residual, out [rows, hidden]; gate_up [experts, 2 * inner, hidden], gate's outputs and then up's;
down [experts, hidden, inner]; biases [experts, 2 * inner] and [experts, hidden]; all contiguous, of one dtype:
float32, float16 or bfloat16. Sums in float32; the inner values are rounded once, and so is the result. Which expert a
place belongs to: see expert_route.py.

Tiles. Each expert's choices are cut into tiles of ROWS, which belong to one expert each. How many there are is known
on the device alone; on the host there are at most

    max_tiles = most_hit + (choices - most_hit) // ROWS,  most_hit = min(choices, experts)

since an expert that is hit has a first tile, and another for each ROWS choices beyond its first choice. So many are
launched; those beyond the last return at once. A program finds its tile's expert by adding up `counts`, 4 bytes for
each expert, so no other kernel has to make a table of that. Grids depend on the number of rows alone, and nothing
waits for the device: a CUDA graph may hold all of it.

Grids: gate_up (max_tiles, inner / OUTPUTS), down (max_tiles, hidden / OUTPUTS), combine (rows, pieces of BLOCK).
Tiles come first, so that two tiles of one expert read its weights at about the same time, once from memory.

Arithmetic, of Qwen3-30B-A3B (128 experts, 8 per row, hidden 2048, inner 768, bfloat16) on 132 SMs:

    an expert   3 * 2048 * 768 * 2 bytes = 9.4 MB; a layer's 8 are 75 MB, 18 us at 4.2 TB/s
    batch 1     8 tiles; with OUTPUTS = 32, gate_up has 8 * 24 = 192 programs and down 8 * 64 = 512. A step of the
                loop reads (2 * 32 + 16) * 128 * 2 = 20 KB; while one is computed, three are on their way or there: 60
                KB, so three programs fit an SM, and all 192 run at once. 4.2 TB/s at 0.7 us need 22 KB on their way to
                each SM; one program has 48 KB of weights. down holds 36 KB: six fit, and all 512 run at once
    batch 32    256 choices hit 128 * (1 - (15/16)^32) = 112 experts: 1.05 GB, 250 us; of the 136 tiles that are
                launched about 24 are empty
    batch 256   2048 choices, 16 per expert: all weights, 1.2 GB, 288 us; sums are 19 GFLOP, 30 us at 650 TFLOP/s
    one row     takes part in a matrix instruction whose other 15 rows are zeros: it is free while weights take longer

A result does not depend on the other rows: for one tuning, every output is summed over pieces of INNER, in ascending
order, in its own column of the instruction; and `combine` adds in the order of choices, without atomics. A tuning is
chosen by the number of rows, so over the numbers of rows of one tuning results are the same to the last bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from alignedserve.kernels.triton.checks import check_like, check_rows, check_tensor
from alignedserve.kernels.triton.expert_route import Routing, route_rows, route_rows_torch
from alignedserve.kernels.triton.launch import dependent_launch, start_dependents, wait_for_dependency

# Four warps of threads with four float32 of each expert's result.
COMBINE_BLOCK = 512
# Of gate_up and of down.
Biases = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class ExpertTuning:
    """The rows, outputs and inner numbers of a tile, warps, and steps of the loop that are loaded at a time."""

    rows: int
    outputs: int
    inner: int
    num_warps: int
    num_stages: int


def expert_tuning(num_choices: int, num_experts: int, value_bytes: int) -> ExpertTuning:
    """Few choices per expert: bound by reading weights. Many: by matrix instructions. Not measured so far."""
    inner = 256 // value_bytes
    if num_choices <= 16 * num_experts:
        return ExpertTuning(16, 32, inner, 4, 4)
    if num_choices <= 64 * num_experts or value_bytes == 4:
        return ExpertTuning(32, 32, inner, 4, 4)
    return ExpertTuning(128, 64, inner // 2, 8, 3)


def mix_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    normalises: bool,
    residual: torch.Tensor,
    out: torch.Tensor | None = None,
    tuning: ExpertTuning | None = None,
    biases: Biases | None = None,
    swiglu: tuple[float, float] | None = None,
) -> torch.Tensor:
    """Returns `out`, which is allocated if not given, and may be the residual. `swiglu`: alpha and limit of the clamped
    one."""
    check_rows("x", x)
    rows, hidden = x.shape
    num_experts, inner = len(gate_up), down.shape[-1]
    check_like("x", x, (rows, hidden), x)
    check_like("gate_up", gate_up, (num_experts, 2 * inner, hidden), x)
    check_like("down", down, (num_experts, hidden, inner), x)
    check_like("residual", residual, (rows, hidden), x)
    if biases is not None:
        check_like("biases of gate_up", biases[0], (num_experts, 2 * inner), x)
        check_like("biases of down", biases[1], (num_experts, hidden), x)
    if logits.shape != (rows, num_experts):
        raise ValueError(
            f"logits must have a row of {num_experts} experts for each of {rows} rows, not {tuple(logits.shape)}"
        )
    if out is None:
        out = torch.empty_like(residual)
    check_like("out", out, (rows, hidden), x)
    if rows:
        routing = route_rows(logits, top_k, normalises)
        tuning = tuning or expert_tuning(rows * top_k, num_experts, x.element_size())
        each = expert_products(x, gate_up, down, routing, tuning, biases, swiglu)
        combine(each, routing.weights, residual, out)
    return out


def max_tiles(num_choices: int, num_experts: int, rows: int) -> int:
    most_hit = min(num_choices, num_experts)
    return most_hit + (num_choices - most_hit) // rows


def expert_products(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routing: Routing,
    tuning: ExpertTuning,
    biases: Biases | None = None,
    swiglu: tuple[float, float] | None = None,
) -> torch.Tensor:
    """Returns float32 [choices, hidden], without the choices' weights."""
    num_experts, hidden, inner = down.shape
    num_choices = len(routing.order)
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
        gate_up,
        biases and biases[0],
        routing.order,
        routing.counts,
        values,
        NUM_IN=hidden,
        NUM_OUT=inner,
        IS_CLAMPED=swiglu is not None,
        ALPHA=swiglu[0] if swiglu else 1.0,
        LIMIT=swiglu[1] if swiglu else 0.0,
        **common,
    )
    _down_kernel[(tiles, triton.cdiv(hidden, tuning.outputs))](
        values,
        down,
        biases and biases[1],
        routing.order,
        routing.counts,
        each,
        NUM_IN=inner,
        NUM_OUT=hidden,
        **common,
    )
    return each


def combine(
    each: torch.Tensor, weights: torch.Tensor, residual: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    (rows, hidden), top_k = residual.shape, weights.shape[1]
    check_tensor("each", each, (rows * top_k, hidden), torch.float32, residual.device)
    _combine_kernel[(rows, triton.cdiv(hidden, COMBINE_BLOCK))](
        each,
        weights,
        residual,
        out,
        HIDDEN=hidden,
        TOP_K=top_k,
        BLOCK=COMBINE_BLOCK,
        num_warps=4,
        **dependent_launch(),
    )
    return out


@triton.jit
def _places_of(counts, tile, NUM_EXPERTS: tl.constexpr, EXPERTS_UP: tl.constexpr, ROWS: tl.constexpr):
    """Returns a tile's expert, its first place, and where the expert's places end: before the first, if there is no
    such tile."""
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
    gate_at = (
        weight + expert.to(tl.int64) * (2 * NUM_OUT * NUM_IN) + output[:, None] * NUM_IN + column[None, :]
    )
    gate = tl.zeros([OUTPUTS, ROWS], tl.float32)
    up = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, NUM_IN, INNER, num_stages=STAGES):
        is_in = (start + column < NUM_IN)[None, :]
        mask = is_output[:, None] & is_in
        rows = tl.load(x_at + start, is_row[:, None] & is_in, other=0.0).T
        gate = tl.dot(tl.load(gate_at + start, mask, other=0.0), rows, gate, input_precision="ieee")
        up_at = gate_at + NUM_OUT * NUM_IN
        up = tl.dot(tl.load(up_at + start, mask, other=0.0), rows, up, input_precision="ieee")
    if bias is not None:
        bias_at = bias + expert * (2 * NUM_OUT) + output
        gate += tl.load(bias_at, is_output, other=0.0).to(tl.float32)[:, None]
        up += tl.load(bias_at + NUM_OUT, is_output, other=0.0).to(tl.float32)[:, None]
    if IS_CLAMPED:
        # A minimum would be a number where the other side is NaN.
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    value = (gate / (1.0 + tl.exp(-ALPHA * gate)) * up).T
    at = place.to(tl.int64)[:, None] * NUM_OUT + output[None, :]
    tl.store(out + at, value.to(out.dtype.element_ty), is_row[:, None] & is_output[None, :])


@triton.jit
def _down_kernel(
    x,
    weight,
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
    weight_at = weight + expert.to(tl.int64) * (NUM_OUT * NUM_IN) + output[:, None] * NUM_IN + column[None, :]
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for start in tl.range(0, NUM_IN, INNER, num_stages=STAGES):
        is_in = (start + column < NUM_IN)[None, :]
        rows = tl.load(x_at + start, is_row[:, None] & is_in, other=0.0).T
        piece = tl.load(weight_at + start, is_output[:, None] & is_in, other=0.0)
        acc = tl.dot(piece, rows, acc, input_precision="ieee")
    if bias is not None:
        acc += tl.load(bias + expert * NUM_OUT + output, is_output, other=0.0).to(tl.float32)[:, None]
    at = choice.to(tl.int64)[:, None] * NUM_OUT + output[None, :]
    tl.store(out + at, acc.T, is_row[:, None] & is_output[None, :])


@triton.jit
def _combine_kernel(
    each,
    weights,
    residual,
    out,
    HIDDEN: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_dependency(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = column < HIDDEN
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(TOP_K):
        choice = row * TOP_K + k
        value = tl.load(each + choice * HIDDEN + column, exists, other=0.0)
        total += tl.load(weights + choice) * value
    total += tl.load(residual + row * HIDDEN + column, exists, other=0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + column, total.to(out.dtype.element_ty), exists)


def mix_experts_torch(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    top_k: int,
    normalises: bool,
    residual: torch.Tensor,
    biases: Biases | None = None,
    swiglu: tuple[float, float] | None = None,
) -> torch.Tensor:
    """The reference, in float64 but for the rounding of the inner values."""
    routing = route_rows_torch(logits, top_k, normalises)
    result = residual.double()
    for k in range(top_k):
        chosen = routing.chosen[:, k].long()
        both = torch.einsum("rh,roh->ro", x.double(), gate_up[chosen].double())
        if biases:
            both = both + biases[0][chosen].double()
        values = _gated(both, swiglu).to(x.dtype).double()
        each = torch.einsum("ri,rhi->rh", values, down[chosen].double())
        if biases:
            each = each + biases[1][chosen].double()
        result = result + routing.weights[:, k, None] * each
    return result.to(x.dtype)


def _gated(both: torch.Tensor, swiglu: tuple[float, float] | None) -> torch.Tensor:
    gate, up = both.chunk(2, dim=-1)
    if swiglu is None:
        return F.silu(gate) * up
    alpha, limit = swiglu
    gate = gate.clamp(max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up.clamp(-limit, limit) + 1)
