"""Weights of linear layers in the layout that the kernels read (csrc/tile.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from alignedserve.kernels.cpu.arena import Arena
from alignedserve.kernels.cpu.library import library
from alignedserve.kernels.cpu.structs import ActivationCode
from alignedserve.kernels.int8 import quantise_columns

TILE_COLUMNS = 32
WORD_BYTES = 4
# What stands for 0 in rows of eight bits.
_ZERO = 128


@dataclass(frozen=True)
class Int8Columns:
    """What a weight in eight bits has beside its codes, padded to whole tiles: see LinearOp."""

    scales: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, num_columns: int) -> Int8Columns:
        return cls(torch.zeros(num_columns), torch.zeros(num_columns, dtype=torch.int32))

    def put(self, columns: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> None:
        self.scales[columns] = scales
        self.starts[columns] = -_ZERO * codes.sum(1, dtype=torch.int32)

    def outputs_from(self, first: int) -> Int8Columns:
        return Int8Columns(self.scales[first:], self.starts[first:])


@dataclass(frozen=True)
class PackedWeight:
    tiles: torch.Tensor
    # The bias in float32, padded to whole tiles.
    bias: torch.Tensor | None
    in_features: int
    # The width of the output: half of the weight's columns if the layer is gated.
    out_features: int
    activation: ActivationCode
    # Of the tiles.
    dtype: torch.dtype
    int8: Int8Columns | None = None

    @property
    def tile_bytes(self) -> int:
        """The bytes of a tile of 32 columns; a row of the unpacked weight is a column here."""
        return _num_steps(self.in_features, self.dtype) * TILE_COLUMNS * WORD_BYTES

    def outputs_from(self, first: int) -> PackedWeight:
        """Returns the layer that yields its outputs from `first` on alone. It shares the memory."""
        if first % TILE_COLUMNS or self.activation is ActivationCode.SILU_GATED:
            raise ValueError(
                f"outputs from {first} on: must begin at a multiple of {TILE_COLUMNS}, not be gated"
            )
        return replace(
            self,
            tiles=self.tiles[first // TILE_COLUMNS * self.tile_bytes :],
            bias=None if self.bias is None else self.bias[first:],
            int8=self.int8 and self.int8.outputs_from(first),
            out_features=self.out_features - first,
        )


@dataclass(frozen=True)
class _Placement:
    """Column c of a part becomes column first + c // run * stride + c % run of the weight."""

    first: int
    run: int
    stride: int

    def columns(self, num: int) -> torch.Tensor:
        c = torch.arange(num)
        return self.first + c // self.run * self.stride + c % self.run


def pack(
    parts: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    activation: ActivationCode,
    dtype: torch.dtype,
    arena: Arena,
    is_int8: bool = False,
) -> PackedWeight:
    """`dtype` is that of rows. With `is_int8` the weight gets eight bits, and rows when they come."""
    _check(parts, biases, activation, dtype)
    stored = torch.int8 if is_int8 else dtype
    in_features = parts[0].shape[1]
    is_gated = activation is ActivationCode.SILU_GATED
    widths = [part.shape[0] for part in parts]
    num_columns = 2 * -(-widths[0] // 16) * 16 if is_gated else sum(widths)
    num_tiles = -(-num_columns // TILE_COLUMNS)
    steps = _num_steps(in_features, stored)
    tiles = arena.allocate(num_tiles * steps * TILE_COLUMNS * WORD_BYTES)
    bias = torch.zeros(num_tiles * TILE_COLUMNS, dtype=torch.float32) if biases is not None else None
    int8 = Int8Columns.of(num_tiles * TILE_COLUMNS) if is_int8 else None
    for i, part in enumerate(parts):
        # The gate and up columns of 16 outputs share a tile.
        placement = (
            _Placement(16 * i, 16, 32) if is_gated else _Placement(sum(widths[:i]), widths[i], widths[i])
        )
        if int8 is None:
            _pack_part(part.to(dtype).contiguous(), placement, tiles)
        else:
            codes, scales = quantise_columns(part.to(dtype))
            _pack_part(codes, placement, tiles)
            int8.put(placement.columns(widths[i]), codes, scales)
        if bias is not None and biases is not None:
            bias[placement.columns(widths[i])] = biases[i].to(dtype).float()
    out_features = widths[0] if is_gated else sum(widths)
    return PackedWeight(tiles, bias, in_features, out_features, activation, stored, int8)


def _num_steps(in_features: int, dtype: torch.dtype) -> int:
    return -(-in_features // (WORD_BYTES // dtype.itemsize))


def _pack_part(part: torch.Tensor, placement: _Placement, tiles: torch.Tensor) -> None:
    library().pack_weight(
        part.data_ptr(),
        *part.shape,
        part.dtype.itemsize,
        placement.first,
        placement.run,
        placement.stride,
        tiles.data_ptr(),
        torch.get_num_threads(),
    )


def _check(
    parts: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    activation: ActivationCode,
    dtype: torch.dtype,
) -> None:
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be float32 or bfloat16, not {dtype}")
    if not parts or any(part.dim() != 2 or 0 in part.shape for part in parts):
        raise ValueError(f"parts must be non-empty matrices, not {[tuple(part.shape) for part in parts]}")
    if len({part.shape[1] for part in parts}) != 1:
        raise ValueError(
            f"parts must have the same number of inputs, not {[part.shape[1] for part in parts]}"
        )
    if activation is ActivationCode.SILU_GATED and (len(parts) != 2 or parts[0].shape != parts[1].shape):
        raise ValueError(f"parts of a gated layer must be gate and up, not {[tuple(p.shape) for p in parts]}")
    if biases is not None and [b.shape for b in biases] != [part.shape[:1] for part in parts]:
        raise ValueError(f"biases must fit the parts, not be {[tuple(b.shape) for b in biases]}")
