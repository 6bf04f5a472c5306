"""A weight in the blocks of a GGUF file, as they are stored, and linear layers of it in plain torch: the reference of
the native kernels (`cpu/`).

Each row of a weight [out, in] is a sequence of blocks, and a block has the codes of `values` inputs with their scales.
A value is

    (code - zero) * scale           Q4_0, Q5_0, Q8_0, Q3_K, Q6_K
    code * scale + minimum          Q4_1, Q5_1, Q2_K, Q4_K, Q5_K
    table[code] * scale             IQ4_NL, IQ4_XS

for each group of 16 or 32 inputs. In blocks of 256 a group's scale is a small integer times the block's float16, and so
is its minimum. MXFP4 becomes the MXFP4 of `quantised.py`.

For all others rows of inputs are quantised to eight bits, with a scale for each 32 inputs. A group's sum of products of
codes is an exact integer. It is multiplied by both scales and added in float32, in the order of groups; then the row's
sum of codes, times its scale and the group's minimum. A row's result depends on no other row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from alignedserve.kernels.int8 import quantise_rows
from alignedserve.kernels.quantised import MXFP4, QuantisedWeight


class BlockType(NamedTuple):
    # Inputs and bytes of a block.
    values: int
    num_bytes: int
    # Bits of a code: the low ones, and those that files store apart.
    low_bits: int = 4
    high_bits: int = 0
    # Inputs of a scale.
    group: int = 32
    zero: int = 0
    has_min: bool = False
    # Bytes of a group's integers in the kernels' tiles: its scale, and its minimum.
    scale_bytes: int = 0

    def bytes_of(self, num_values: int) -> int:
        """Bytes of whole blocks in the kernels' tiles."""
        of_blocks = num_values // self.values * (4 if self.has_min else 2)
        of_groups = num_values // self.group * self.scale_bytes
        return of_blocks + of_groups + num_values * (self.low_bits + self.high_bits) // 8


TYPES = {
    "Q4_0": BlockType(32, 18, zero=8),
    "Q4_1": BlockType(32, 20, has_min=True),
    "Q5_0": BlockType(32, 22, high_bits=1, zero=16),
    "Q5_1": BlockType(32, 24, high_bits=1, has_min=True),
    "Q8_0": BlockType(32, 34, low_bits=8, zero=128),
    # One byte has both integers, with four bits each.
    "Q2_K": BlockType(256, 84, low_bits=2, group=16, has_min=True, scale_bytes=1),
    "Q3_K": BlockType(256, 110, low_bits=2, high_bits=1, group=16, zero=4, scale_bytes=1),
    "Q4_K": BlockType(256, 144, has_min=True, scale_bytes=2),
    "Q5_K": BlockType(256, 176, high_bits=1, has_min=True, scale_bytes=2),
    "Q6_K": BlockType(256, 210, high_bits=2, group=16, zero=32, scale_bytes=1),
    "IQ4_NL": BlockType(32, 18, zero=128),
    "IQ4_XS": BlockType(256, 136, zero=128, scale_bytes=1),
    "MXFP4": BlockType(32, 17),
}
# The values of codes of IQ4_NL and IQ4_XS. Kernels add 128 to them.
TABLE = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
TABLE_TYPES = ("IQ4_NL", "IQ4_XS")
# Inputs of a row's scale, and of each sum of its codes.
ROW_GROUP, SUM_VALUES = 32, 16
# Codes decoded at a time, so that no whole weight is in memory with a byte or more for each.
_NUM_AT_ONCE = 1 << 22


@dataclass(frozen=True)
class Blocks:
    """The blocks of some rows, decoded."""

    # [out, in] uint8
    codes: torch.Tensor
    # [out, blocks] float16; the minima of blocks of 256 have the other sign than in the file
    scales: torch.Tensor
    minima: torch.Tensor | None
    # [out, groups], in blocks of 256: int8, and uint8
    group_scales: torch.Tensor | None = None
    group_minima: torch.Tensor | None = None


@dataclass(frozen=True)
class GgufWeight:
    """A weight [out, in]. Raises ValueError if the bytes do not match the type."""

    # One of TYPES.
    type: str
    # [out, bytes of a row] uint8, possibly a view of a mapped file
    data: torch.Tensor

    def __post_init__(self) -> None:
        if self.data.shape[1] % TYPES[self.type].num_bytes:
            raise ValueError(
                f"rows of {self.data.shape[1]} bytes: must be whole blocks of {TYPES[self.type].num_bytes}"
            )

    @property
    def shape(self) -> torch.Size:
        block = TYPES[self.type]
        return torch.Size((len(self.data), self.data.shape[1] // block.num_bytes * block.values))

    @property
    def is_mxfp4(self) -> bool:
        return self.type == "MXFP4"

    @property
    def num_bytes(self) -> int:
        """Bytes in the kernels' tiles: those of the file, but each of a block's small integers takes a byte."""
        return TYPES[self.type].bytes_of(self.shape.numel())

    def rows(self, first: int, end: int, step: int = 1) -> GgufWeight:
        """The weight of some of the outputs. Shares the memory."""
        return replace(self, data=self.data[first:end:step])

    def columns(self, first: int, end: int) -> GgufWeight:
        """The weight of some of the inputs, in whole blocks. Shares the memory."""
        block = TYPES[self.type]
        if first % block.values or end % block.values:
            raise ValueError(f"inputs {first} to {end}: must be whole blocks of {block.values}")
        return replace(
            self,
            data=self.data[
                :, first // block.values * block.num_bytes : end // block.values * block.num_bytes
            ],
        )

    def pieces(self, multiple: int = 1) -> Iterator[tuple[int, GgufWeight]]:
        """Yields the first output and the weight of some outputs at a time: a multiple of a number, but the last."""
        step = max(1, _NUM_AT_ONCE // self.shape[1] // multiple) * multiple
        for first in range(0, len(self.data), step):
            yield first, self.rows(first, first + step)

    def decoded(self) -> Blocks:
        """All codes at once, of any type but MXFP4."""
        num_out, form = len(self.data), TYPES[self.type]
        blocks = self.data.reshape(num_out, -1, form.num_bytes)
        decode = _decode_large if form.values == 256 else _decode_small
        found = decode(self.type, form, blocks)
        return Blocks(*(None if each is None else each.reshape(num_out, -1) for each in found))  # type: ignore[arg-type]

    def as_mxfp4(self) -> QuantisedWeight:
        """The same values as `QuantisedWeight` has them."""
        blocks = self.data.reshape(len(self.data), -1, TYPES["MXFP4"].num_bytes)
        powers = blocks[:, :, 0].contiguous().view(torch.float8_e8m0fnu).bfloat16()
        return QuantisedWeight(MXFP4, _nibbles(blocks[:, :, 1:]).reshape(self.shape), powers, None, 32)

    def dequantised(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """The values, computed in float32."""
        values = torch.empty(self.shape, dtype=dtype)
        for first, piece in self.pieces():
            values[first : first + len(piece.data)] = piece._dequantised()
        return values

    def _dequantised(self) -> torch.Tensor:
        if self.is_mxfp4:
            return self.as_mxfp4().dequantised()
        blocks = self.decoded()
        values = self.numbers(blocks) * self._of_inputs(self.scales(blocks))
        return values if blocks.minima is None else values + self._of_inputs(self.minima(blocks))

    def numbers(self, blocks: Blocks) -> torch.Tensor:
        """What scales are multiplied by, in float32."""
        if self.type in TABLE_TYPES:
            return torch.tensor(TABLE, dtype=torch.float32)[blocks.codes.int()]
        return blocks.codes.float() - TYPES[self.type].zero

    def scales(self, blocks: Blocks) -> torch.Tensor:
        """The scale of each group, in float32."""
        return self._of_groups(blocks.scales, blocks.group_scales)

    def minima(self, blocks: Blocks) -> torch.Tensor:
        """What is added to the values of each group, in float32."""
        assert blocks.minima is not None
        return self._of_groups(blocks.minima, blocks.group_minima)

    def _of_groups(self, of_blocks: torch.Tensor, of_groups: torch.Tensor | None) -> torch.Tensor:
        form = TYPES[self.type]
        wide = of_blocks.float().repeat_interleave(form.values // form.group, 1)
        return wide if of_groups is None else wide * of_groups.float()

    def _of_inputs(self, of_groups: torch.Tensor) -> torch.Tensor:
        return of_groups.repeat_interleave(TYPES[self.type].group, 1)


# What `Blocks` has, for each block: [out, block, ...].
_Decoded = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]


def _decode_small(name: str, form: BlockType, blocks: torch.Tensor) -> _Decoded:
    """Fields of a block: scale, minimum, high bits, and low ones."""
    scales, at = _half(blocks, 0), 2
    minima = None
    if form.has_min:
        minima, at = _half(blocks, at), at + 2
    high = None
    if form.high_bits:
        high, at = _bits(blocks[:, :, at : at + 4], 1), at + 4
    codes = blocks[:, :, at:]
    codes = codes ^ 0x80 if form.low_bits == 8 else _nibbles(codes)
    if high is not None:
        codes |= high << 4
    return codes, scales, minima, None, None


def _decode_large(name: str, form: BlockType, blocks: torch.Tensor) -> _Decoded:
    """The fields of these types have an order of their own."""

    def field(begin: int, end: int) -> torch.Tensor:
        return blocks[:, :, begin:end]

    match name:
        case "Q2_K":
            codes, both = _planes(field(16, 80), 2, 32), field(0, 16)
            return codes, _half(blocks, 80), -_half(blocks, 82), both & 15, both >> 4
        case "Q3_K":
            codes = _planes(field(32, 96), 2, 32) | _planes(field(0, 32), 1, 32) << 2
            of_groups = _planes(field(96, 104), 4, 8) | _planes(field(104, 108), 2, 4) << 4
            return codes, _half(blocks, 108), None, _less(of_groups, 32), None
        case "Q4_K":
            codes = _planes(field(16, 144), 4, 32)
            return codes, _half(blocks, 0), -_half(blocks, 2), *_six_bits(field(4, 16))
        case "Q5_K":
            codes = _planes(field(48, 176), 4, 32) | _planes(field(16, 48), 1, 32) << 4
            return codes, _half(blocks, 0), -_half(blocks, 2), *_six_bits(field(4, 16))
        case "Q6_K":
            codes = _planes(field(0, 128), 4, 64) | _planes(field(128, 192), 2, 32) << 4
            return codes, _half(blocks, 208), None, field(192, 208).contiguous().view(torch.int8), None
        case _:
            low = torch.stack([field(4, 8) & 15, field(4, 8) >> 4], -1).flatten(2)
            high = torch.stack([field(2 + i // 4, 3 + i // 4) >> i % 4 * 2 & 3 for i in range(8)], 2).flatten(
                2
            )
            codes = _nibbles(field(8, 136).reshape(*blocks.shape[:2], 8, 16)).flatten(2)
            return codes, _half(blocks, 0), None, _less(low | high << 4, 32), None


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16)


def _nibbles(field: torch.Tensor) -> torch.Tensor:
    """The low halves of all bytes, then the high ones."""
    return torch.cat([field & 15, field >> 4], -1)


def _bits(field: torch.Tensor, count: int) -> torch.Tensor:
    """The parts of each byte, from the lowest on."""
    shifts = torch.arange(0, 8, count, dtype=torch.uint8)
    return (field.unsqueeze(-1) >> shifts & (1 << count) - 1).flatten(2)


def _planes(field: torch.Tensor, count: int, run: int) -> torch.Tensor:
    """For each run of bytes: the lowest bits of all, then the next ones of all, and so on."""
    runs = field.reshape(*field.shape[:2], -1, run)
    return torch.stack([runs >> shift & (1 << count) - 1 for shift in range(0, 8, count)], 3).flatten(2)


def _six_bits(field: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Eight scales and eight minima. The first four of each are in the low bits of a byte of their own."""
    scale, minimum, both = torch.split(field, 4, 2)
    scales = torch.cat([scale & 63, both & 15 | scale >> 2 & 0x30], 2)
    return scales, torch.cat([minimum & 63, both >> 4 | minimum >> 2 & 0x30], 2)


def _less(codes: torch.Tensor, zero: int) -> torch.Tensor:
    return codes.view(torch.int8) - zero


def linear_gguf(x: torch.Tensor, weight: GgufWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns x @ weight.T + bias, in float32, as the native kernels compute it. Float64 holds a group's sums exactly,
    and the results that they are added to."""
    blocks, form = weight.decoded(), TYPES[weight.type]
    numbers = weight.numbers(blocks).double()
    scales = weight.scales(blocks).double()
    minima = weight.minima(blocks).double() if form.has_min else None
    out = torch.zeros(len(x), len(weight.data), dtype=torch.float64)
    codes, of_rows = quantise_rows(x.reshape(-1, ROW_GROUP))
    codes, of_rows = codes.view(x.shape).double(), of_rows.view(len(x), x.shape[1] // ROW_GROUP)
    for g, begin in enumerate(range(0, x.shape[1], form.group)):
        some, of_row = codes[:, begin : begin + form.group], of_rows[:, begin // ROW_GROUP, None]
        sums = ((some @ numbers[:, begin : begin + form.group].T).float() * of_row).double()
        out = (sums * scales[:, g] + out).float().double()
        if minima is not None:
            of_codes = (some.sum(1, keepdim=True).float() * of_row).double()
            out = (of_codes * minima[:, g] + out).float().double()
    return out.float() if bias is None else out.float() + bias.float()
