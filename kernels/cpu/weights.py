"""Weights of linear layers, with those of experts and adapters, in the layout that the kernels read (csrc/tile.h)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from alignedserve.kernels.cpu.arena import Arena
from alignedserve.kernels.cpu.gguf import pack_gguf, tile_bytes
from alignedserve.kernels.cpu.groups import TILE_COLUMNS, WORD_BYTES, GroupForm, pack_groups
from alignedserve.kernels.cpu.library import library
from alignedserve.kernels.cpu.structs import ActivationCode, WeightKind
from alignedserve.kernels.gguf import GgufWeight
from alignedserve.kernels.quantised import QuantisedWeight, side_by_side, to_signed

# The code of 0 in eight-bit rows.
_ZERO = 128


@dataclass(frozen=True)
class Int8Columns:
    """Values of an eight-bit weight beside its codes, padded to whole tiles: see LinearOp."""

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
    # The dtype of rows, and of the tiles if they are not quantised.
    dtype: torch.dtype
    int8: Int8Columns | None = None
    groups: GroupForm | None = None
    # The type of GGUF.
    gguf: str | None = None
    # The layer's outputs after these, with weights in other forms. Each entry is a run of alike outputs.
    rest: tuple[PackedWeight, ...] = ()
    # Whether this rank has some of the inputs, so that results are added up across ranks.
    is_partial: bool = False
    # If this rank has some of the outputs: the number of outputs of all ranks together, else 0.
    num_joined: int = 0
    adapters: PackedAdapters | None = None

    @property
    def kind(self) -> WeightKind:
        if self.groups:
            return self.groups.kind
        if self.gguf:
            return WeightKind[self.gguf]
        return WeightKind.INT8 if self.int8 else WeightKind.AS_ROWS

    @property
    def tile_bytes(self) -> int:
        """Bytes of a tile of 32 columns. A row of the unpacked weight is a column here."""
        if self.groups:
            return self.groups.tile_bytes
        if self.gguf:
            return tile_bytes(self.gguf, self.in_features)
        return _tile_bytes(self.in_features, torch.int8 if self.int8 else self.dtype)

    @property
    def num_outputs(self) -> int:
        """Outputs of the whole layer."""
        return self.out_features + sum(each.out_features for each in self.rest)

    @property
    def num_columns(self) -> int:
        """Columns of whole tiles."""
        return self.tiles.numel() // self.tile_bytes * TILE_COLUMNS

    def outputs_from(self, first: int) -> PackedWeight:
        """Returns the layer with its outputs from `first` on. Shares the memory."""
        if self.adapters is not None:
            raise ValueError("a layer with adapters yields all of its outputs")
        if first % TILE_COLUMNS or self.activation.is_gated:
            raise ValueError(
                f"outputs from {first} on: must begin at a multiple of {TILE_COLUMNS}, not be gated"
            )
        if self.rest and first >= self.out_features:
            following = replace(self.rest[0], rest=self.rest[1:])
            return following.outputs_from(first - self.out_features)
        return replace(
            self,
            tiles=self.tiles[first // TILE_COLUMNS * self.tile_bytes :],
            bias=None if self.bias is None else self.bias[first:],
            int8=self.int8 and self.int8.outputs_from(first),
            out_features=self.out_features - first,
        )


@dataclass(frozen=True)
class PackedExperts:
    """One linear layer of every expert, one after another."""

    tiles: torch.Tensor
    # The first expert's layer, which begins at the start of `tiles`. All experts have its shape.
    first: PackedWeight
    num_experts: int
    # For eight-bit weights: scales and starts of all experts' columns.
    int8: Int8Columns | None
    # Biases of all experts' columns, in float32.
    biases: torch.Tensor | None

    @property
    def expert_bytes(self) -> int:
        return self.tiles.numel() // self.num_experts

    @property
    def expert_columns(self) -> int:
        return self.first.num_columns


@dataclass(frozen=True)
class PackedAdapters:
    # The a of every adapter, packed like one linear layer each. Its columns are [part][rank].
    shrink: PackedExperts
    # [adapters, rank, columns of the layer's tiles]
    expand: torch.Tensor
    scales: torch.Tensor
    # The part of each column of the layer's tiles.
    parts: torch.Tensor

    def put(self, number: int, one: PackedAdapters) -> None:
        """Puts one adapter in the place of adapter `number`, counted from 1."""
        size, index = self.shrink.expert_bytes, number - 1
        self.shrink.tiles[index * size : number * size] = one.shrink.tiles
        self.expand[index], self.scales[index] = one.expand[0], one.scales[0]

    @property
    def rank(self) -> int:
        return self.expand.shape[1]


@dataclass(frozen=True)
class _Placement:
    """Column c of a part becomes column first + c // run * stride + c % run of the weight."""

    first: int
    run: int
    stride: int

    def columns(self, num: int) -> torch.Tensor:
        c = torch.arange(num)
        return self.first + c // self.run * self.stride + c % self.run


@dataclass(frozen=True)
class _Shape:
    """The places of the outputs of a layer's parts."""

    placements: list[_Placement]
    widths: list[int]
    num_tiles: int
    out_features: int

    @classmethod
    def of(cls, widths: list[int], is_gated: bool) -> _Shape:
        # The gate and up columns of 16 outputs share a tile.
        placements = [
            _Placement(16 * i, 16, 32) if is_gated else _Placement(sum(widths[:i]), width, width)
            for i, width in enumerate(widths)
        ]
        num_columns = 2 * -(-widths[0] // 16) * 16 if is_gated else sum(widths)
        return cls(
            placements, widths, -(-num_columns // TILE_COLUMNS), widths[0] if is_gated else sum(widths)
        )

    def columns(self) -> list[torch.Tensor]:
        """The columns of each part."""
        return [place.columns(width) for place, width in zip(self.placements, self.widths, strict=True)]


def num_tiles(widths: Sequence[int], activation: ActivationCode) -> int:
    """The number of tiles of a layer with parts of these widths."""
    return _Shape.of([*widths], activation.is_gated).num_tiles


def columns_of_parts(widths: Sequence[int], activation: ActivationCode) -> list[torch.Tensor]:
    """The columns of each part among those of the tiles."""
    return _Shape.of([*widths], activation.is_gated).columns()


def pack(
    parts: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] | None,
    activation: ActivationCode,
    dtype: torch.dtype,
    arena: Arena,
) -> PackedWeight:
    """`dtype` is the dtype of rows and of the weight."""
    shape = _shape_of([part.shape for part in parts], biases, activation, dtype)
    in_features = parts[0].shape[1]
    tiles = arena.allocate(shape.num_tiles * _tile_bytes(in_features, dtype))
    for part, placement in zip(parts, shape.placements, strict=True):
        _pack_part(part.to(dtype).contiguous(), placement, tiles)
    bias = _pack_biases(biases, shape, dtype)
    return PackedWeight(tiles, bias, in_features, shape.out_features, activation, dtype)


def pack_quantised(
    parts: Sequence[QuantisedWeight],
    biases: Sequence[torch.Tensor] | None,
    activation: ActivationCode,
    dtype: torch.dtype,
    arena: Arena,
) -> PackedWeight:
    """`dtype` is the dtype of rows. They are quantised to eight bits at run time if the weight is integer."""
    shape = _shape_of([part.shape for part in parts], biases, activation, dtype)
    bias, in_features = _pack_biases(biases, shape, dtype), parts[0].shape[1]
    made = PackedWeight(parts[0].codes, bias, in_features, shape.out_features, activation, dtype)
    if all(part.is_int8_columns for part in parts):
        tiles = arena.allocate(shape.num_tiles * _tile_bytes(in_features, torch.int8))
        int8 = Int8Columns.of(shape.num_tiles * TILE_COLUMNS)
        for part, placement, columns in zip(parts, shape.placements, shape.columns(), strict=True):
            codes = to_signed(part.codes)
            _pack_part(codes.contiguous(), placement, tiles)
            int8.put(columns, codes, part.scales.flatten().float())
        return replace(made, tiles=tiles, int8=int8)
    whole = side_by_side(parts)
    form = GroupForm.of(whole, dtype)
    tiles = arena.allocate(shape.num_tiles * form.tile_bytes)
    pack_groups(whole, torch.cat(shape.columns()), tiles.view(shape.num_tiles, -1), form)
    return replace(made, tiles=tiles, groups=form)


def pack_blocks(
    parts: Sequence[GgufWeight],
    biases: Sequence[torch.Tensor] | None,
    activation: ActivationCode,
    dtype: torch.dtype,
    arena: Arena,
) -> PackedWeight:
    """Packs parts of one type of GGUF. Rows are in `dtype`, and quantised to eight bits at run time."""
    shape = _shape_of([part.shape for part in parts], biases, activation, dtype)
    name, in_features = parts[0].type, parts[0].shape[1]
    tiles = arena.allocate(shape.num_tiles * tile_bytes(name, in_features))
    pack_gguf(parts, activation.is_gated, tiles.view(shape.num_tiles, -1))
    bias = _pack_biases(biases, shape, dtype)
    return PackedWeight(tiles, bias, in_features, shape.out_features, activation, dtype, gguf=name)


def _pack_biases(
    biases: Sequence[torch.Tensor] | None, shape: _Shape, dtype: torch.dtype
) -> torch.Tensor | None:
    if biases is None:
        return None
    bias = torch.zeros(shape.num_tiles * TILE_COLUMNS, dtype=torch.float32)
    for part, columns in zip(biases, shape.columns(), strict=True):
        bias[columns] = part.to(dtype).float()
    return bias


def _tile_bytes(in_features: int, dtype: torch.dtype) -> int:
    return -(-in_features // (WORD_BYTES // dtype.itemsize)) * TILE_COLUMNS * WORD_BYTES


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


def _shape_of(
    parts: Sequence[torch.Size],
    biases: Sequence[torch.Tensor] | None,
    activation: ActivationCode,
    dtype: torch.dtype,
) -> _Shape:
    is_gated = activation.is_gated
    if dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"dtype must be float32 or bfloat16, not {dtype}")
    if not parts or any(len(part) != 2 or 0 in part for part in parts):
        raise ValueError(f"parts must be non-empty matrices, not {[tuple(part) for part in parts]}")
    if len({part[1] for part in parts}) != 1:
        raise ValueError(f"parts must have the same number of inputs, not {[part[1] for part in parts]}")
    if is_gated and (len(parts) != 2 or parts[0] != parts[1]):
        raise ValueError(f"parts of a gated layer must be gate and up, not {[tuple(p) for p in parts]}")
    if biases is not None and [b.shape for b in biases] != [part[:1] for part in parts]:
        raise ValueError(f"biases must fit the parts, not be {[tuple(b.shape) for b in biases]}")
    return _Shape.of([part[0] for part in parts], is_gated)
