"""Greedy and Gumbel-max sampling of rows of logits. Nothing waits for the GPU.

Grid: first (rows, pieces of the vocabulary), where each piece stores its best value and its column; then (rows,) over
the pieces. Many multiprocessors thus read even a single row at once.
Shapes: logits [rows, vocab], rows may be strided; keys [rows] int64; temperature [rows] float32; tokens [rows] int64,
is_broken [rows] bool.
dtypes: float32, float16, bfloat16 logits; the noise is float32, and so is its sum with them.

Gumbel noise is a function of (key, column) alone, the same as in kernels/cpu/sampling.py. Its integers are equal bit
for bit, and their logarithms agree up to rounding. The reference is `gumbel_argmax_torch` there. NaN never wins. A row
with only NaN and -inf gives column 0.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from alignedserve.kernels.triton.checks import check_rows, check_tensor

# Columns per program. Small pieces spread few rows over the GPU; large ones keep many loads in flight in each thread.
FEW_ROWS = 16
PIECE_OF_FEW = 1024
PIECE_OF_MANY = 4096


@triton.jit
def best_of_piece_kernel(
    logits,
    keys,
    temperature,
    best_values,
    best_columns,
    row_stride,
    MARKS_NAN: tl.constexpr,
    WIDTH: tl.constexpr,
    PIECE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    columns = piece * PIECE + tl.arange(0, PIECE)
    values = tl.load(logits + row * row_stride + columns, columns < WIDTH, other=float("-inf")).to(tl.float32)
    is_nan = values != values
    scores = values
    if temperature is not None:
        divisor = tl.load(temperature + row)
        if divisor > 0:
            scores = values / divisor + gumbel_noise(columns, tl.load(keys + row))
    elif keys is not None:
        scores += gumbel_noise(columns, tl.load(keys + row))
    scores = tl.where(scores != scores, float("-inf"), scores)
    best, at = tl.max(scores, axis=0, return_indices=True, return_indices_tie_break_left=True)
    if MARKS_NAN:
        best = tl.where(tl.max(is_nan.to(tl.int32), axis=0) > 0, float("nan"), best)
    place = row * tl.num_programs(1) + piece
    tl.store(best_values + place, best)
    tl.store(best_columns + place, piece * PIECE + at)


@triton.jit
def best_of_row_kernel(
    best_values,
    best_columns,
    tokens,
    is_broken,
    NUM_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    pieces = tl.arange(0, BLOCK)
    exists = pieces < NUM_PIECES
    values = tl.load(best_values + row * NUM_PIECES + pieces, exists, other=float("-inf"))
    is_nan = values != values
    best, at = tl.max(
        tl.where(is_nan, float("-inf"), values),
        axis=0,
        return_indices=True,
        return_indices_tie_break_left=True,
    )
    tl.store(tokens + row, tl.load(best_columns + row * NUM_PIECES + at).to(tl.int64))
    if is_broken is not None:
        has_nan = tl.max(is_nan.to(tl.int32), axis=0) > 0
        tl.store(is_broken + row, has_nan | (tl.abs(best) == float("inf")))


@triton.jit
def gumbel_noise(columns, key):
    low = (key & 0xFFFFFFFF).to(tl.uint32)
    high = ((key >> 32) & 0xFFFFFFFF).to(tl.uint32)
    hashed = mix(mix(columns.to(tl.uint32) ^ low) ^ high)
    uniform = tl.minimum((hashed.to(tl.float32) + 0.5) * (2.0**-32), 1.0 - 2.0**-24)
    return -tl.log(exponential(uniform))


@triton.jit
def exponential(uniform):
    """Returns -log1p(-uniform). Small values give the largest noise, and 1 - uniform would lose their digits. They
    use the series 2 atanh(s) of s = uniform / (2 - uniform)."""
    s = uniform / (2.0 - uniform)
    z = s * s
    series = 2.0 * s * (1.0 + z * (1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7 + z * (1.0 / 9)))))
    return tl.where(uniform < 0.25, series, -tl.log(1.0 - uniform))


@triton.jit
def mix(x):
    """The hash "lowbias32", of uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, per row, the index (int64) of the first maximum, and whether there is a NaN or the maximum is not
    finite."""
    check_rows("logits", logits)
    is_broken = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    return _launch(logits, None, None, is_broken), is_broken


def gumbel_argmax(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the sampled index (int64) per row of logits and its key. Logits are scaled by temperature; -inf is
    never sampled."""
    check_rows("logits", logits)
    check_tensor("keys", keys, (len(logits),), torch.int64, logits.device)
    return _launch(logits, keys, None, None)


def sample(
    logits: torch.Tensor, keys: torch.Tensor, temperature: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Samples a mixed batch in one pass: gumbel_argmax(logits / temperature) for rows with a temperature (float32)
    above 0, argmax for the others. Also returns whether a row is broken, as argmax does."""
    check_rows("logits", logits)
    check_tensor("keys", keys, (len(logits),), torch.int64, logits.device)
    check_tensor("temperature", temperature, (len(logits),), torch.float32, logits.device)
    is_broken = torch.empty(len(logits), dtype=torch.bool, device=logits.device)
    return _launch(logits, keys, temperature, is_broken), is_broken


def _launch(
    logits: torch.Tensor,
    keys: torch.Tensor | None,
    temperature: torch.Tensor | None,
    is_broken: torch.Tensor | None,
) -> torch.Tensor:
    rows, width = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows == 0:
        return tokens
    piece, num_warps = (PIECE_OF_FEW, 4) if rows <= FEW_ROWS else (PIECE_OF_MANY, 8)
    num_pieces = triton.cdiv(width, piece)
    best_values = torch.empty(rows, num_pieces, dtype=torch.float32, device=logits.device)
    best_columns = torch.empty(rows, num_pieces, dtype=torch.int32, device=logits.device)
    best_of_piece_kernel[(rows, num_pieces)](
        logits,
        keys,
        temperature,
        best_values,
        best_columns,
        logits.stride(0),
        MARKS_NAN=is_broken is not None,
        WIDTH=width,
        PIECE=piece,
        num_warps=num_warps,
    )
    best_of_row_kernel[(rows,)](
        best_values,
        best_columns,
        tokens,
        is_broken,
        NUM_PIECES=num_pieces,
        BLOCK=triton.next_power_of_2(num_pieces),
        num_warps=1,
    )
    return tokens


def argmax_reference(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    best = logits.max(dim=-1)
    first = (logits == best.values.unsqueeze(1)).int().argmax(dim=-1)
    return first, ~best.values.isfinite()
