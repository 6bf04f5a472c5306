"""A mixture of experts, from rows and router logits to mixed rows.

    route     the experts of each row, and all choices in the order of experts: expert_route.py
    gate_up   hidden[place] = silu(x[row] @ gate.T) * (x[row] @ up.T), by the expert at `place`
    down      each[choice] = hidden[place] @ down.T, in float32: both in expert_products.py
    combine   out[row] = residual[row] + sum of weight * each, over the row's choices, the first choice first

Sums may have biases, and the clamped SwiGLU may replace silu(gate) * up (gpt-oss).

x, residual, out [rows, hidden]; gate_up [experts, 2 * inner, hidden], the outputs of gate and then of up; down
[experts, hidden, inner]; biases [experts, 2 * inner] and [experts, hidden]; all contiguous, of one dtype: float32,
float16 or bfloat16. Sums are in float32. The inner values are rounded once, and so is the result. gate_up and down may
be in codes (coded_weight.py): [experts * 2 * inner, hidden] and [experts * hidden, inner].

Grid of combine: (rows, pieces of BLOCK).

A result does not depend on the other rows. For one tuning, every output is summed over pieces of INNER, in ascending
order, in its own column of the instruction; `combine` adds in the order of choices, without atomics. The number of rows
determines the tuning, so results are equal to the last bit over all numbers of rows with the same tuning.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from alignedserve.kernels.triton.checks import check_like, check_rows, check_tensor
from alignedserve.kernels.triton.coded_weight import CodedWeight
from alignedserve.kernels.triton.expert_products import (
    Biases,
    ExpertTuning,
    ExpertWeights,
    expert_products,
    expert_tuning,
)
from alignedserve.kernels.triton.expert_route import route_rows, route_rows_torch
from alignedserve.kernels.triton.launch import dependent_launch, start_dependents, wait_for_dependency

# Four warps of threads with four float32 of each expert's result.
COMBINE_BLOCK = 512


def mix_experts(
    x: torch.Tensor,
    logits: torch.Tensor,
    gate_up: ExpertWeights,
    down: ExpertWeights,
    top_k: int,
    normalises: bool,
    residual: torch.Tensor,
    out: torch.Tensor | None = None,
    tuning: ExpertTuning | None = None,
    biases: Biases | None = None,
    swiglu: tuple[float, float] | None = None,
) -> torch.Tensor:
    """Returns `out`, which is allocated if not given, and may be the residual. `swiglu`: alpha and limit of the
    clamped SwiGLU."""
    check_rows("x", x)
    rows, hidden = x.shape
    inner = down.shape[-1]
    num_experts = len(down) if isinstance(down, torch.Tensor) else down.shape[0] // hidden
    check_like("x", x, (rows, hidden), x)
    _check_weights("gate_up", gate_up, (num_experts, 2 * inner, hidden), x)
    _check_weights("down", down, (num_experts, hidden, inner), x)
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
        is_coded = isinstance(down, CodedWeight)
        tuning = tuning or expert_tuning(rows * top_k, num_experts, x.element_size(), is_coded)
        each = expert_products(x, gate_up, down, routing, tuning, biases, swiglu)
        combine(each, routing.weights, residual, out)
    return out


def _check_weights(
    name: str, weights: ExpertWeights, shape: tuple[int, int, int], like: torch.Tensor
) -> None:
    if isinstance(weights, torch.Tensor):
        return check_like(name, weights, shape, like)
    num_experts, num_out, num_in = shape
    if weights.shape != (num_experts * num_out, num_in) or not weights.codes.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous codes of {[num_experts * num_out, num_in]}, not of {weights.shape}"
        )


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
    """The reference, in float64 except for the rounding of the inner values."""
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
