"""Weights in 8 or 4 bits as the linear kernels read them: loaded as codes, widened and scaled in registers.

    format  a row of codes                                    a value
    INT8    int8, each 128 less than in QuantisedWeight        (code - zero) * scale; zero is 0 without zeros
    FP8     bytes of e4m3                                      code * scale
    INT4    two in a byte, the first in its lower half         (code - zero) * scale; zero is 8 without zeros
    MXFP4   e2m1, in bytes as INT4                             code * scale

codes [out, bytes]; scales, in bfloat16 or float32, and zeros, in the codes' dtype, [out, groups]; all contiguous. In a
mixture (experts.py), the outputs of one expert follow those of another.

`dequantise` writes the whole weight in floating point. It pays for many rows, when the FLOPs of a product outweigh the
weight's bytes.
Grid: (outputs / ROWS, inputs / CHUNK).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from alignedserve.kernels import quantised
from alignedserve.kernels.quantised import QuantisedWeight, to_signed
from alignedserve.kernels.triton.checks import check_like

PLAIN, INT8, FP8, INT4, MXFP4 = range(5)
# Formats from this one on have two codes in a byte.
PACKED = INT4
FORMATS = {quantised.INT8: INT8, quantised.FP8: FP8, quantised.INT4: INT4, quantised.MXFP4: MXFP4}
# Outputs and inputs of one program of `dequantise`.
ROWS, CHUNK = 8, 512
# Kernels can read a module's values only in this form.
_PLAIN, _FP8, _PACKED = tl.constexpr(PLAIN), tl.constexpr(FP8), tl.constexpr(PACKED)
_INT4, _MXFP4 = tl.constexpr(INT4), tl.constexpr(MXFP4)


@dataclass(frozen=True)
class CodedWeight:
    """A weight [out, in] on the device that computes with it."""

    format: int
    num_in: int
    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    # Inputs per scale.
    group: int

    @classmethod
    def of(cls, weight: QuantisedWeight, device: torch.device) -> CodedWeight:
        """Returns a copy on the device."""
        codes, zeros = weight.codes.to(device), weight.zeros
        if weight.kind == quantised.INT8:
            codes, zeros = to_signed(codes), None if zeros is None else to_signed(zeros)
        else:
            codes = _packed(codes) if FORMATS[weight.kind] >= PACKED else codes.view(torch.uint8).clone()
        num_in = weight.shape[1]
        return cls(
            FORMATS[weight.kind],
            num_in,
            codes.contiguous(),
            weight.scales.to(device, copy=True).contiguous(),
            None if zeros is None else zeros.to(device, copy=True).contiguous(),
            min(weight.group, num_in),
        )

    @property
    def kind(self) -> str:
        return next(kind for kind, number in FORMATS.items() if number == self.format)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.codes), self.num_in

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        return self.codes, self.scales, self.zeros

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time constants of a kernel. ALIKE: a power of two; each aligned run of this many inputs has one
        scale."""
        alike = 1 << 30 if self.group == self.num_in else self.group & -self.group
        return {"FORMAT": self.format, "GROUP": self.group, "ALIKE": alike}

    def rows(self, first: int, end: int) -> CodedWeight:
        """The weight of some of the outputs. Shares the memory."""
        return self._with(None if each is None else each[first:end] for each in self.tensors)

    def room_for(self, count: int) -> CodedWeight:
        """Allocates memory for the outputs of `count` weights of this form."""
        return self._with(
            None if each is None else each.new_empty(count * len(each), each.shape[1])
            for each in self.tensors
        )

    def _with(self, tensors: Iterable[torch.Tensor | None]) -> CodedWeight:
        codes, scales, zeros = tensors
        assert codes is not None and scales is not None
        return replace(self, codes=codes, scales=scales, zeros=zeros)


def tensors_of(
    weight: torch.Tensor | CodedWeight,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Codes, or the weight itself; scales and zeros."""
    return weight.tensors if isinstance(weight, CodedWeight) else (weight, None, None)


def constants_of(weight: torch.Tensor | CodedWeight) -> dict[str, Any]:
    if isinstance(weight, CodedWeight):
        return weight.constants
    return {"FORMAT": PLAIN, "GROUP": 1, "ALIKE": 1}


def _packed(codes: torch.Tensor) -> torch.Tensor:
    even = torch.nn.functional.pad(codes, (0, codes.shape[1] % 2))
    return even[:, ::2] | even[:, 1::2] << 4


@triton.jit
def load_piece(
    weight,
    scales,
    zeros,
    row,
    is_row,
    start,
    NUM_IN: tl.constexpr,
    CHUNK: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ALIKE: tl.constexpr,
    SKIP: tl.constexpr = 0,
):
    """Loads CHUNK inputs, from `start` on, of the rows SKIP rows further on: values as stored, or in float32 for
    codes."""
    PER_BYTE: tl.constexpr = 2 if FORMAT >= _PACKED else 1
    WIDTH: tl.constexpr = (NUM_IN + PER_BYTE - 1) // PER_BYTE
    column = start // PER_BYTE + tl.arange(0, CHUNK // PER_BYTE)
    at = weight + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    piece = tl.load(at + SKIP * WIDTH, mask=is_row[:, None] & (column < WIDTH)[None, :], other=0)
    if FORMAT != _PLAIN:
        row += SKIP
        piece = values_of(piece, scales, zeros, row, is_row, start, NUM_IN, CHUNK, FORMAT, GROUP, ALIKE)
    return piece


@triton.jit
def values_of(
    codes,
    scales,
    zeros,
    row,
    is_row,
    start,
    NUM_IN: tl.constexpr,
    CHUNK: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ALIKE: tl.constexpr,
):
    """Returns the values, in float32, of the rows' codes for CHUNK inputs from `start` on. Values beyond the weight
    are 0."""
    PART: tl.constexpr = ALIKE if ALIKE < CHUNK else CHUNK
    NUM_GROUPS: tl.constexpr = (NUM_IN + GROUP - 1) // GROUP
    group = (start + tl.arange(0, CHUNK // PART) * PART) // GROUP
    at = row.to(tl.int64)[:, None] * NUM_GROUPS + group[None, :]
    exists = is_row[:, None] & (group < NUM_GROUPS)[None, :]
    scale = tl.load(scales + at, mask=exists, other=0.0).to(tl.float32)
    parts = tl.reshape(_numbers(codes, FORMAT), [row.shape[0], CHUNK // PART, PART])
    if zeros is not None:
        parts -= tl.load(zeros + at, mask=exists, other=0).to(tl.float32)[:, :, None]
    elif FORMAT == _INT4:
        parts -= 8.0
    return tl.reshape(parts * scale[:, :, None], [row.shape[0], CHUNK])


@triton.jit
def _numbers(codes, FORMAT: tl.constexpr):
    if FORMAT == _INT4:
        numbers = tl.interleave(codes & 15, codes >> 4).to(tl.float32)
    elif FORMAT == _MXFP4:
        numbers = _e2m1(tl.interleave(codes & 15, codes >> 4))
    elif FORMAT == _FP8:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        numbers = codes.to(tl.float32)
    return numbers


@triton.jit
def _e2m1(codes):
    # The bits of e2m1 are those of a float16 with an exponent that is 14 less. Subnormal numbers are subnormal in both.
    bits = codes.to(tl.uint16)
    halves = ((bits & 8) << 12) | ((bits & 7) << 9)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * 16384.0


def dequantise(weight: CodedWeight, out: torch.Tensor) -> torch.Tensor:
    num_out, num_in = weight.shape
    check_like("out", out, (num_out, num_in), out)
    grid = (triton.cdiv(num_out, ROWS), triton.cdiv(num_in, CHUNK))
    _dequantise_kernel[grid](
        *weight.tensors, out, num_out, NUM_IN=num_in, ROWS=ROWS, CHUNK=CHUNK, **weight.constants
    )
    return out


@triton.jit(do_not_specialize=["num_out"])
def _dequantise_kernel(
    codes,
    scales,
    zeros,
    out,
    num_out,
    NUM_IN: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ALIKE: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    is_row = row < num_out
    start = tl.program_id(1) * CHUNK
    column = start + tl.arange(0, CHUNK)
    value = load_piece(codes, scales, zeros, row, is_row, start, NUM_IN, CHUNK, FORMAT, GROUP, ALIKE)
    at = out + row.to(tl.int64)[:, None] * NUM_IN + column[None, :]
    tl.store(at, value.to(out.dtype.element_ty), mask=is_row[:, None] & (column < NUM_IN)[None, :])
