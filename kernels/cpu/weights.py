"""Weights of linear layers in the layout that the kernels read (csrc/tile.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from alignedserve.kernels.cpu.arena import Arena
from alignedserve.kernels.cpu.library import library
from alignedserve.kernels.cpu.structs import ActivationCode, WeightKind
from alignedserve.kernels.int4 import GROUP, quantise_groups
from alignedserve.kernels.int8 import quantise_columns

if TYPE_CHECKING:
    from alignedserve.kernels.cpu.adapters import PackedAdapters

TILE_COLUMNS = 32
WORD_BYTES = 4
# What stands for 0 in rows of eight bits.
_ZERO = 128
# Of a tile of weights in four bits: see csrc/int4.h.
_STEP_VALUES, _SCALE_BYTES = 8, 2 * TILE_COLUMNS
_GROUP_BYTES = _SCALE_BYTES + GROUP // _STEP_VALUES * TILE_COLUMNS * WORD_BYTES


@dataclass(frozen=True)
class Int8Columns:
    """What a weight in eight bits has beside its codes, padded to whole tiles: see LinearOp."""

    scales: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, num_columns: int) -> Int8Columns:
        return cls(torch.zeros(num_columns), torch.zeros(num_columns, dtype=torch.int32))

    @classmethod
    def joined(cls, layers: Sequence[Int8Columns]) -> Int8Columns:
        """The columns of several layers, one after another."""
        return cls(torch.cat([each.scales for each in layers]), torch.cat([each.starts for each in layers]))

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
    # Of rows, and of the tiles where those are as rows.
    dtype: torch.dtype
    kind: WeightKind = WeightKind.AS_ROWS
    int8: Int8Columns | None = None
    # Whether this rank has some of the inputs, and results are added up across ranks.
    is_partial: bool = False
    # If this rank has some of the outputs, which are joined: those of all ranks that count.
    num_joined: int = 0
    adapters: PackedAdapters | None = None

    @property
    def tile_bytes(self) -> int:
        """The bytes of a tile of 32 columns; a row of the unpacked weight is a column here."""
        return _tile_bytes(self.in_features, self.dtype, self.kind)

    def outputs_from(self, first: int) -> PackedWeight:
        """Returns the layer that yields its outputs from `first` on alone. It shares the memory."""
        if self.adapters is not None:
            raise ValueError("a layer with adapters yields all of its outputs")
        if first % TILE_COLUMNS or self.activation.is_gated:
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


def num_tiles(widths: Sequence[int], activation: ActivationCode) -> int:
    """The tiles of a layer with parts of these widths."""
    num_columns = 2 * -(-widths[0] // 16) * 16 if activation.is_gated else sum(widths)
    return -(-num_columns // TILE_COLUMNS)


def columns_of_parts(widths: Sequence[int], activation: ActivationCode) -> list[torch.Tensor]:
    """Where the columns of each part are among those of the tiles."""
    return [_placement(widths, i, activation).columns(width) for i, width in enumerate(widths)]


def _placement(widths: Sequence[int], index: int, activation: ActivationCode) -> _Placement:
    if activation.is_gated:
        # The gate and up columns of 16 outputs share a tile.
        return _Placement(16 * index, 16, 32)
    return _Placement(sum(widths[:index]), widths[index], widths[index])


def pack(
    parts: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    activation: ActivationCode,
    dtype: torch.dtype,
    arena: Arena,
    kind: WeightKind = WeightKind.AS_ROWS,
) -> PackedWeight:
    """`dtype` is that of rows, which get eight bits when they come, unless the weight is as they are."""
    _check(parts, biases, activation, dtype)
    in_features = parts[0].shape[1]
    widths = [part.shape[0] for part in parts]
    count = num_tiles(widths, activation)
    tiles = arena.allocate(count * _tile_bytes(in_features, dtype, kind))
    bias = torch.zeros(count * TILE_COLUMNS, dtype=torch.float32) if biases is not None else None
    int8 = Int8Columns.of(count * TILE_COLUMNS) if kind is WeightKind.INT8 else None
    for i, part in enumerate(parts):
        placement = _placement(widths, i, activation)
        part = part.to(dtype)
        if kind is WeightKind.INT4:
            _pack_int4(part, placement.columns(widths[i]), tiles.view(count, -1, _GROUP_BYTES))
        elif int8:
            codes, scales = quantise_columns(part)
            _pack_part(codes, placement, tiles)
            int8.put(placement.columns(widths[i]), codes, scales)
        else:
            _pack_part(part.contiguous(), placement, tiles)
        if bias is not None and biases is not None:
            bias[placement.columns(widths[i])] = biases[i].to(dtype).float()
    out_features = widths[0] if activation.is_gated else sum(widths)
    return PackedWeight(tiles, bias, in_features, out_features, activation, dtype, kind, int8)


def _tile_bytes(in_features: int, dtype: torch.dtype, kind: WeightKind) -> int:
    if kind is WeightKind.INT4:
        return -(-in_features // GROUP) * _GROUP_BYTES
    stored = torch.int8 if kind is WeightKind.INT8 else dtype
    return -(-in_features // (WORD_BYTES // stored.itemsize)) * TILE_COLUMNS * WORD_BYTES


def _pack_int4(part: torch.Tensor, columns: torch.Tensor, tiles: torch.Tensor) -> None:
    """`tiles`: [tile, group, bytes]."""
    codes, scales = quantise_groups(part)
    halves = codes.view(len(codes), -1, GROUP // _STEP_VALUES, 2, WORD_BYTES)
    words = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    tile, column = columns // TILE_COLUMNS, columns % TILE_COLUMNS
    of_scales, of_codes = torch.split(tiles, [_SCALE_BYTES, _GROUP_BYTES - _SCALE_BYTES], dim=2)
    of_scales.view(*tiles.shape[:2], TILE_COLUMNS, 2)[tile, :, column] = scales.unsqueeze(2).view(torch.uint8)
    of_codes.view(*tiles.shape[:2], -1, TILE_COLUMNS, WORD_BYTES)[tile, :, :, column] = words


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
    if activation.is_gated and (len(parts) != 2 or parts[0].shape != parts[1].shape):
        raise ValueError(f"parts of a gated layer must be gate and up, not {[tuple(p.shape) for p in parts]}")
    if biases is not None and [b.shape for b in biases] != [part.shape[:1] for part in parts]:
        raise ValueError(f"biases must fit the parts, not be {[tuple(b.shape) for b in biases]}")
