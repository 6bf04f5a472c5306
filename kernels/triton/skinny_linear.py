"""A few rows through a linear layer. Reading the weights is the limit, as for one row, but it uses matrix instructions.

    out = x @ weight.T + bias + residual

x [rows, in], weight [out, in], both contiguous; out, residual [rows, out]. float16 or bfloat16, sums in float32. A
weight in codes (coded_weight.py) becomes values of x's dtype in registers before the matrix instruction.

The product is computed as its transpose, with weights on the long side of the instruction and rows on the short one, so
that few rows waste little. The work is one line of equal units, (tile of outputs, piece of the inner dimension). As
many programs as fit the device at once each take an equal part of it. The weights are read at a constant rate until all
programs end together. Outputs that are divided between programs are stored as parts, and the program that finishes last
adds them up.

Grid: (num_programs,).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from alignedserve.kernels.triton.coded_weight import (
    PACKED,
    PLAIN,
    CodedWeight,
    constants_of,
    tensors_of,
    values_of,
)

# The most values in a part (outputs times rows of a tile), and the most tiles.
MAX_PART = 64 * 64
MAX_TILES = 8192
# The most rows that use a weight in codes without a copy of it in x's dtype. To be measured.
MAX_CODED_ROWS = 64
_PLAIN, _PACKED = tl.constexpr(PLAIN), tl.constexpr(PACKED)


@dataclass(frozen=True)
class SkinnyTuning:
    """The outputs and inner values of a tile, warps, and tiles that are loaded at a time."""

    outputs: int
    inner: int
    num_warps: int
    num_stages: int
    programs_per_multiprocessor: int = 1


def skinny_tuning(num_rows: int, num_in: int, num_out: int) -> SkinnyTuning | None:
    """Returns the fastest tuning on an H200; None where cuBLAS was faster.

    For few outputs, cuBLAS cuts the inner dimension, and needs another kernel to add the parts up.
    """
    if num_rows > 32 or num_out > min(num_in, 5120):
        return None
    if num_in < 2 * num_out:
        return SkinnyTuning(64, 128, 4, 5) if num_out <= 4096 else None
    return SkinnyTuning(64, 256, 4, 4 if num_rows <= 16 else 3)


def coded_skinny_tuning(x: torch.Tensor, weight: CodedWeight) -> SkinnyTuning | None:
    """Not measured so far. Codes are widened by the same warps that wait for the next ones, so two programs take turns.

    Returns None for many rows, and if tiles can't be loaded: rows of both must begin at multiples of 16 bytes.
    """
    is_aligned = weight.num_in % 8 == weight.codes.shape[1] % 16 == 0
    if len(x) > MAX_CODED_ROWS or x.element_size() != 2 or not x.is_contiguous() or not is_aligned:
        return None
    return SkinnyTuning(64, 128, 4, 4, programs_per_multiprocessor=2)


def can_be_skinny(x: torch.Tensor) -> bool:
    """Returns whether Hopper's copy engine, which loads the tiles, can read x."""
    return x.is_cuda and x.element_size() == 2 and torch.cuda.get_device_capability(x.device)[0] >= 9


class SkinnyScratch:
    """Parts of outputs, and the number of stored parts of each. All layers share it, one after the other.

    Captured graphs refer to these buffers, so they are allocated once, with the largest size that is ever needed.
    """

    def __init__(self, num_programs: int, device: torch.device) -> None:
        self.num_programs = num_programs
        self.parts = torch.empty(2 * num_programs, MAX_PART, dtype=torch.float32, device=device)
        self.num_done = torch.zeros(MAX_TILES, dtype=torch.int32, device=device)


@cache
def scratch_of(device: torch.device, programs_per_multiprocessor: int) -> SkinnyScratch:
    is_cuda = device.type == "cuda"
    num_multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if is_cuda else 1
    return SkinnyScratch(programs_per_multiprocessor * num_multiprocessors, device)


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor | CodedWeight,
    out: torch.Tensor,
    tuning: SkinnyTuning,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    scratch: SkinnyScratch | None = None,
) -> torch.Tensor:
    rows, num_in = x.shape
    num_out = weight.shape[0]
    codes, scales, zeros = tensors_of(weight)
    constants = constants_of(weight)
    if weight.shape[1] != num_in or not codes.is_contiguous() or not x.is_contiguous():
        raise ValueError(f"weight must be contiguous [outputs, {num_in}], not {tuple(weight.shape)}")
    if out.shape != (rows, num_out) or not out.is_contiguous():
        raise ValueError(f"out must be contiguous ({rows}, {num_out}), not {tuple(out.shape)}")
    if rows == 0:
        return out
    rows_up = max(16, triton.next_power_of_2(rows))
    if tuning.outputs * rows_up > MAX_PART or triton.cdiv(num_out, tuning.outputs) > MAX_TILES:
        raise ValueError(
            f"rows, outputs: {rows} rows and {num_out} outputs in tiles of {tuning.outputs} are too many"
        )
    scratch = scratch or scratch_of(x.device, tuning.programs_per_multiprocessor)
    width = tuning.inner // 2 if constants["FORMAT"] >= PACKED else tuning.inner
    _skinny_kernel[(scratch.num_programs,)](
        TensorDescriptor.from_tensor(x, [rows_up, tuning.inner]),
        TensorDescriptor.from_tensor(codes, [tuning.outputs, width]),
        scales,
        zeros,
        bias,
        residual,
        out,
        scratch.parts,
        scratch.num_done,
        rows,
        NUM_IN=num_in,
        NUM_OUT=num_out,
        OUTPUTS=tuning.outputs,
        ROWS=rows_up,
        INNER=tuning.inner,
        STAGES=tuning.num_stages,
        num_warps=tuning.num_warps,
        **constants,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def _skinny_kernel(
    x,
    weight,
    scales,
    zeros,
    bias,
    residual,
    out,
    parts,
    num_done,
    num_rows,
    NUM_IN: tl.constexpr,
    NUM_OUT: tl.constexpr,
    OUTPUTS: tl.constexpr,
    ROWS: tl.constexpr,
    INNER: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ALIKE: tl.constexpr,
):
    WIDTH: tl.constexpr = INNER // 2 if FORMAT >= _PACKED else INNER
    STEPS: tl.constexpr = (NUM_IN + INNER - 1) // INNER
    TILES: tl.constexpr = (NUM_OUT + OUTPUTS - 1) // OUTPUTS
    PART: tl.constexpr = OUTPUTS * ROWS
    program = tl.program_id(0)
    per_program = (TILES * STEPS + tl.num_programs(0) - 1) // tl.num_programs(0)
    first_unit = program * per_program
    end_unit = tl.minimum(first_unit + per_program, TILES * STEPS)
    at = tl.arange(0, OUTPUTS)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    tile = first_unit // STEPS
    step = first_unit % STEPS
    acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
    for unit in tl.range(first_unit, end_unit, num_stages=STAGES):
        rows = x.load([0, step * INNER])
        piece = weight.load([tile * OUTPUTS, step * WIDTH])
        if FORMAT != _PLAIN:
            output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
            piece = values_of(
                piece,
                scales,
                zeros,
                output,
                output < NUM_OUT,
                step * INNER,
                NUM_IN,
                INNER,
                FORMAT,
                GROUP,
                ALIKE,
            ).to(rows.dtype)
        acc = tl.dot(piece, rows.T, acc)
        is_last = step + 1 == STEPS
        if is_last | (unit + 1 == end_unit):
            if is_last & (unit - step >= first_unit):
                _finish(acc, bias, residual, out, tile, num_rows, NUM_OUT, OUTPUTS, ROWS)
            else:
                # Slot 0: the tile that this program began in the middle of. Slot 1: the one that it did not finish.
                slot = 2 * program + (unit - step > first_unit)
                tl.store(parts + slot * PART + at, acc)
            acc = tl.zeros([OUTPUTS, ROWS], tl.float32)
        step = tl.where(is_last, 0, step + 1)
        tile += is_last.to(tl.int32)
    if first_unit < end_unit:
        # Stored parts of this program must be visible before it counts itself as done.
        tl.debug_barrier()
        first_tile = first_unit // STEPS
        last_tile = (end_unit - 1) // STEPS
        is_first_cut = (first_unit % STEPS != 0) | ((first_tile + 1) * STEPS > end_unit)
        for which in tl.static_range(2):
            cut_tile = first_tile if which == 0 else last_tile
            is_cut = is_first_cut if which == 0 else (last_tile > first_tile) & (end_unit % STEPS != 0)
            if is_cut:
                first = cut_tile * STEPS // per_program
                last = ((cut_tile + 1) * STEPS - 1) // per_program
                if tl.atomic_add(num_done + cut_tile, 1, sem="acq_rel") == last - first:
                    tl.store(num_done + cut_tile, 0)
                    whole = tl.zeros([OUTPUTS, ROWS], tl.float32)
                    for other in range(first, last + 1):
                        slot = 2 * other + (other * per_program < cut_tile * STEPS)
                        whole += tl.load(parts + slot * PART + at, cache_modifier=".cg")
                    _finish(whole, bias, residual, out, cut_tile, num_rows, NUM_OUT, OUTPUTS, ROWS)


@triton.jit
def _finish(
    acc, bias, residual, out, tile, num_rows, NUM_OUT: tl.constexpr, OUTPUTS: tl.constexpr, ROWS: tl.constexpr
):
    output = tile * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    is_output = output < NUM_OUT
    mask = is_output[:, None] & (row < num_rows)[None, :]
    at = row[None, :] * NUM_OUT + output[:, None]
    if bias is not None:
        acc += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)[:, None]
    if residual is not None:
        acc += tl.load(residual + at, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
