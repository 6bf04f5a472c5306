"""Temperature, min-p, top-k and top-p of a whole batch in place, in one launch without a sort, a copy or a wait.

Cuts are by value, as in alignedserve/ops/truncate.py: all tokens as likely as the last kept one are kept.

Grid: (rows,), one program per row. The result of a row does not depend on the other rows, to the last bit.
Shapes: logits [rows, vocab], rows may be strided; temperature, top_p, min_p [rows] float32; top_k [rows] int32.
dtypes: float32 logits; probabilities and their sums are float32.

A cut keeps all values from some floor up. The floor is the largest value with enough tokens at or above it: `top_k`
tokens, or `top_p` of the mass. It is found bit by bit, two bits per pass over the row, in integers that order like
floats. That reads the row sixteen times, from the cache. A sort would need several times the row's memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from alignedserve.kernels.triton.checks import check_rows, check_tensor

BLOCK = 4096
NUM_WARPS = 16


@triton.jit
def truncate_kernel(
    logits,
    temperature,
    top_k,
    top_p,
    log_min_p,
    row_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    divisor = tl.load(temperature + row)
    if divisor > 0:
        top = scale_row(logits, divisor, WIDTH, BLOCK)
        # Some of the threads that read next read values that others wrote.
        tl.debug_barrier()
        floor = top + tl.load(log_min_p + row)
        count = tl.load(top_k + row)
        if (count > 0) & (count < WIDTH):
            floor = highest_floor(logits, floor, top, count.to(tl.float32), False, WIDTH, BLOCK)
        share = tl.load(top_p + row)
        if share < 1:
            total = tl.sum(weights_above(logits, floor, top, WIDTH, BLOCK), axis=0)
            floor = highest_floor(logits, floor, top, share * total, True, WIDTH, BLOCK)
        drop_below(logits, floor, WIDTH, BLOCK)


@triton.jit
def scale_row(logits, divisor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Divides in place, and returns the maximum."""
    largest = tl.full([BLOCK], float("-inf"), tl.float32)
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, columns < WIDTH, other=float("-inf")) / divisor
        tl.store(logits + columns, values, columns < WIDTH)
        largest = tl.maximum(largest, values)
    return tl.max(largest, axis=0)


@triton.jit
def weights_above(logits, floor, top, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Returns the sum of exp(logit - top) of logits from `floor` up, added in the order of highest_floor."""
    sums = tl.zeros([BLOCK], tl.float32)
    for start in range(0, WIDTH, BLOCK):
        sums += weigh(load_part(logits, start, WIDTH, BLOCK), floor, top, start, True, WIDTH, BLOCK)
    return sums


@triton.jit
def highest_floor(
    logits, floor, top, wanted, IS_MASS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Returns the largest value such that logits of at least this value, from `floor` up, weigh at least `wanted`;
    or `floor`."""
    found = tl.full([], 0, tl.uint32)
    step = tl.full([], 1 << 30, tl.uint32)
    for _ in range(16):
        first = tl.zeros([BLOCK], tl.float32)
        second = tl.zeros([BLOCK], tl.float32)
        third = tl.zeros([BLOCK], tl.float32)
        for start in range(0, WIDTH, BLOCK):
            values = load_part(logits, start, WIDTH, BLOCK)
            weights = weigh(values, floor, top, start, IS_MASS, WIDTH, BLOCK)
            order = to_ordered(values)
            first += tl.where(order >= found + step, weights, 0.0)
            second += tl.where(order >= found + 2 * step, weights, 0.0)
            third += tl.where(order >= found + 3 * step, weights, 0.0)
        digit = (tl.sum(first, axis=0) >= wanted).to(tl.uint32)
        digit += (tl.sum(second, axis=0) >= wanted).to(tl.uint32)
        digit += (tl.sum(third, axis=0) >= wanted).to(tl.uint32)
        found += digit * step
        step = step >> 2
    return tl.where(found == 0, floor, tl.maximum(floor, from_ordered(found)))


@triton.jit
def load_part(logits, start, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    columns = start + tl.arange(0, BLOCK)
    return tl.load(logits + columns, columns < WIDTH, other=float("-inf"))


@triton.jit
def weigh(values, floor, top, start, IS_MASS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    counts = (values >= floor) & (start + tl.arange(0, BLOCK) < WIDTH)
    if IS_MASS:
        return tl.where(counts, tl.exp(values - top), 0.0)
    else:
        return counts.to(tl.float32)


@triton.jit
def drop_below(logits, floor, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    for start in range(0, WIDTH, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = tl.load(logits + columns, columns < WIDTH, other=float("inf"))
        tl.store(logits + columns, tl.full([BLOCK], float("-inf"), tl.float32), values < floor)


@triton.jit
def to_ordered(values):
    """Converts floats to uint32 in the same order: positive ones above the sign bit, negative ones inverted below
    it."""
    bits = values.to(tl.uint32, bitcast=True)
    return tl.where(bits >> 31 == 0, bits | 0x80000000, bits ^ 0xFFFFFFFF)


@triton.jit
def from_ordered(order):
    bits = tl.where(order >> 31 == 1, order & 0x7FFFFFFF, order ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


def truncate(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
) -> None:
    """Truncates in place. A row of temperature 0 (greedy) is not changed. top_k 0, top_p 1 and min_p 0 cut nothing."""
    check_rows("logits", logits)
    rows, width = logits.shape
    if logits.dtype != torch.float32:
        raise ValueError(f"logits must be float32, not {logits.dtype}")
    for name, values in (("temperature", temperature), ("top_p", top_p), ("min_p", min_p)):
        check_tensor(name, values, (rows,), torch.float32, logits.device)
    check_tensor("top_k", top_k, (rows,), torch.int32, logits.device)
    if rows == 0:
        return
    truncate_kernel[(rows,)](
        logits,
        temperature,
        top_k,
        top_p,
        min_p.log(),
        logits.stride(0),
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=NUM_WARPS,
    )


def truncate_reference(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> torch.Tensor:
    """The reference for one row, which sorts it. Probabilities are summed in float64."""
    if temperature == 0:
        return logits
    logits = logits / temperature
    if min_p > 0:
        logits = _from(logits, logits.max() + torch.tensor(min_p).log())
    if 0 < top_k < len(logits):
        logits = _from(logits, logits.sort(descending=True).values[top_k - 1])
    if top_p < 1:
        best = logits.sort(descending=True).values
        num_short = int((best.double().softmax(0).cumsum(0) < top_p).sum())
        logits = _from(logits, best[min(num_short, len(best) - 1)])
    return logits


def _from(logits: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    return logits.masked_fill(logits < floor, float("-inf"))
