"""Chooses the experts of rows, and orders all choices by expert.

    route   logits [rows, experts] -> chosen [rows, top_k] int32 and weights [rows, top_k] float32
    order   chosen -> counts [experts] int32 and order [rows * top_k] int32

The largest logit is chosen first; among equals the lowest number. NaN counts as the largest. Weights are the softmax
over all experts in float32, scaled to sum to one if requested. Choice row * top_k + k is the row's k-th expert. `order`
lists choices by expert, and for one expert in ascending order, so the order is always the same. Nothing is read on the
host, and no size depends on the choices.

Grids: route (rows,). A program has all experts of its row. With a single row it also orders them, because at batch 1
the launch of a kernel matters. order (experts,). A program reads all choices twice: first to count those of lower
experts, which come before its own, and then to place its own.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from alignedserve.kernels.triton.checks import check_rows
from alignedserve.kernels.triton.launch import dependent_launch, start_dependents, wait_for_dependency

# The most experts: a program of `route` holds a row of logits in registers.
MAX_EXPERTS = 1024
# Choices that a program of `order` reads at a time.
BLOCK = 1024


class ExpertRouting(NamedTuple):
    # Per row and choice: the expert, and its weight.
    chosen: torch.Tensor
    weights: torch.Tensor
    # Choices by expert, and the number of choices of each expert.
    order: torch.Tensor
    counts: torch.Tensor


def route_rows(logits: torch.Tensor, top_k: int, normalises: bool) -> ExpertRouting:
    check_rows("logits", logits)
    rows, num_experts = logits.shape
    if num_experts > MAX_EXPERTS:
        raise ValueError(f"logits must be of at most {MAX_EXPERTS} experts, not {num_experts}")
    if not 1 <= top_k <= num_experts:
        raise ValueError(f"top_k must be from 1 to the {num_experts} experts, not {top_k}")
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=logits.device)
    order = torch.empty(rows * top_k, dtype=torch.int32, device=logits.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=logits.device)
    routing = ExpertRouting(chosen, torch.empty_like(chosen, dtype=torch.float32), order, counts)
    if rows:
        _route_kernel[(rows,)](
            logits,
            *routing,
            logits.stride(0),
            NUM_EXPERTS=num_experts,
            EXPERTS_UP=triton.next_power_of_2(num_experts),
            TOP_K=top_k,
            NORMALISES=normalises,
            IS_ALONE=rows == 1,
            num_warps=1,
            **dependent_launch(),
        )
    if rows != 1:
        _order_kernel[(num_experts,)](
            chosen, order, counts, rows * top_k, BLOCK=BLOCK, num_warps=4, **dependent_launch()
        )
    return routing


@triton.jit
def _route_kernel(
    logits,
    chosen,
    weights,
    order,
    counts,
    logits_stride,
    NUM_EXPERTS: tl.constexpr,
    EXPERTS_UP: tl.constexpr,
    TOP_K: tl.constexpr,
    NORMALISES: tl.constexpr,
    IS_ALONE: tl.constexpr,
    PDL: tl.constexpr,
):
    wait_for_dependency(PDL)
    start_dependents(PDL)
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS_UP)
    exists = expert < NUM_EXPERTS
    logit = tl.load(logits + row * logits_stride + expert, exists, other=float("-inf")).to(tl.float32)
    # For any logits, NaN included, the chosen experts are distinct and exist.
    wide = tl.where(logit != logit, float("inf"), logit)
    rank = tl.where(exists, TOP_K, TOP_K + 1)
    for k in tl.static_range(TOP_K):
        is_left = rank == TOP_K
        best = tl.max(tl.where(is_left, wide, float("-inf")), 0)
        first = tl.min(tl.where(is_left & (wide == best), expert, EXPERTS_UP), 0)
        rank = tl.where(expert == first, k, rank)
    each = tl.where(exists, tl.exp(logit - tl.max(wide, 0)), 0.0)
    if NORMALISES:
        each = tl.where(rank < TOP_K, each, 0.0)
    at = row * TOP_K + rank
    is_chosen = rank < TOP_K
    tl.store(chosen + at, expert, is_chosen)
    tl.store(weights + at, each / tl.sum(each, 0), is_chosen)
    if IS_ALONE:
        count = is_chosen.to(tl.int32)
        tl.store(order + tl.cumsum(count, 0) - 1, rank, is_chosen)
        tl.store(counts + expert, count, exists)


@triton.jit(do_not_specialize=["num_choices"])
def _order_kernel(chosen, order, counts, num_choices, BLOCK: tl.constexpr, PDL: tl.constexpr):
    wait_for_dependency(PDL)
    start_dependents(PDL)
    expert = tl.program_id(0)
    num_lower = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, num_choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        of = tl.load(chosen + choice, choice < num_choices, other=tl.num_programs(0))
        num_lower += (of < expert).to(tl.int32)
    first = tl.sum(num_lower, 0)
    count = tl.zeros([], tl.int32)
    for start in tl.range(0, num_choices, BLOCK):
        choice = start + tl.arange(0, BLOCK)
        of = tl.load(chosen + choice, choice < num_choices, other=tl.num_programs(0))
        is_own = (of == expert).to(tl.int32)
        place = first + count + tl.cumsum(is_own, 0) - 1
        tl.store(order + place, choice, is_own == 1)
        count += tl.sum(is_own, 0)
    tl.store(counts + expert, count)


def route_rows_torch(logits: torch.Tensor, top_k: int, normalises: bool) -> ExpertRouting:
    """The reference, with weights in float64."""
    wide = logits.double()
    chosen = wide.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = wide.softmax(dim=-1).gather(1, chosen)
    if normalises:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    order = chosen.flatten().argsort(stable=True)
    counts = chosen.flatten().bincount(minlength=logits.shape[1])
    return ExpertRouting(chosen.int(), weights, order.int(), counts.int())
