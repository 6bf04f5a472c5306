"""Weights in groups, in the tiles of csrc/groups.h."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.kernels.cpu.structs import WeightKind
from alignedserve.kernels.quantised import BITS, BLOCK, FP8, INT4, INT8, MXFP4, QuantisedWeight

TILE_COLUMNS = 32
WORD_BYTES = 4
_KINDS = {
    INT4: WeightKind.INT4,
    INT8: WeightKind.INT8_GROUPS,
    FP8: WeightKind.FP8,
    MXFP4: WeightKind.MXFP4,
}


@dataclass(frozen=True)
class GroupForm:
    """The layout of a layer's groups in a tile: the struct GroupForm of csrc/groups.h."""

    kind: WeightKind
    # Values of all groups but the last, and of all groups together.
    values: int
    num_values: int
    # Bytes of a word of codes: four; with FP8 one for each value in a word of the rows; with MXFP4 one for two values.
    word_bytes: int
    code_bits: int
    has_float_scales: bool
    has_zeros: bool

    @classmethod
    def of(cls, weight: QuantisedWeight, row_dtype: torch.dtype) -> GroupForm:
        block = BLOCK[weight.kind]
        kind = _KINDS[weight.kind]
        fp8_bytes = WORD_BYTES // row_dtype.itemsize
        word_bytes = {WeightKind.FP8: fp8_bytes, WeightKind.MXFP4: 1}.get(kind, WORD_BYTES)
        num_values = -(-weight.shape[1] // block) * block
        return cls(
            kind,
            num_values if weight.num_groups == 1 else weight.group,
            num_values,
            word_bytes,
            BITS[weight.kind],
            weight.scales.dtype is torch.float32,
            weight.zeros is not None,
        )

    @property
    def scale_bytes(self) -> int:
        return TILE_COLUMNS * (4 if self.has_float_scales else 2)

    @property
    def header_bytes(self) -> int:
        return self.scale_bytes + (TILE_COLUMNS * 2 if self.has_zeros else 0)

    @property
    def tile_bytes(self) -> int:
        num_groups = -(-self.num_values // self.values)
        return num_groups * self.header_bytes + self.code_bytes(self.num_values)

    def code_bytes(self, num_values: int) -> int:
        return num_values * TILE_COLUMNS * self.code_bits // 8


def pack_groups(weight: QuantisedWeight, columns: torch.Tensor, tiles: torch.Tensor, form: GroupForm) -> None:
    """Writes outputs of a weight to these columns of `tiles`, [tile, bytes]. `form` may have float scales and zeros
    even if this weight has none."""
    padding = form.num_values - weight.shape[1]
    codes = torch.nn.functional.pad(weight.codes.view(torch.uint8), (0, padding))
    num_whole = form.num_values // form.values
    group_bytes = form.header_bytes + form.code_bytes(form.values)
    # The last group may be shorter than the others.
    for groups, of_tiles in (
        (slice(0, num_whole), tiles[:, : num_whole * group_bytes]),
        (slice(num_whole, None), tiles[:, num_whole * group_bytes :]),
    ):
        scales = weight.scales[:, groups]
        if not scales.shape[1]:
            continue
        of_codes = codes[:, groups.start * form.values :]
        if groups.stop is not None:
            of_codes = of_codes[:, : groups.stop * form.values]
        zeros = weight.with_zeros()[:, groups] if form.has_zeros else None
        _put(of_codes.reshape(*scales.shape, -1), scales, zeros, columns, of_tiles, form)


def _put(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    columns: torch.Tensor,
    tiles: torch.Tensor,
    form: GroupForm,
) -> None:
    """`codes`: [out, group, value]. `tiles`: only the bytes of these groups."""
    num_tiles, num_groups = len(tiles), scales.shape[1]
    tile, column = columns // TILE_COLUMNS, columns % TILE_COLUMNS
    bytes_of = tiles.unfold(1, tiles.shape[1] // num_groups, tiles.shape[1] // num_groups)
    scale_dtype = torch.float32 if form.has_float_scales else torch.bfloat16
    of_scales = bytes_of[:, :, : form.scale_bytes].view(num_tiles, num_groups, TILE_COLUMNS, -1)
    of_scales[tile, :, column] = scales.to(scale_dtype).contiguous().unsqueeze(2).view(torch.uint8)
    if zeros is not None:
        of_zeros = bytes_of[:, :, form.scale_bytes : form.header_bytes].view(
            num_tiles, num_groups, TILE_COLUMNS, -1
        )
        of_zeros[tile, :, column] = zeros.to(torch.int16).unsqueeze(2).view(torch.uint8)
    if form.kind is WeightKind.INT4:
        halves = codes.view(*codes.shape[:2], -1, 2, WORD_BYTES)
        words = halves[:, :, :, 0] | halves[:, :, :, 1] << 4
    elif form.kind is WeightKind.MXFP4:
        pairs = codes.view(*codes.shape[:2], -1, 2)
        words = (pairs[..., 0] | pairs[..., 1] << 4).unsqueeze(-1)
    else:
        words = codes.view(*codes.shape[:2], -1, form.word_bytes)
    of_codes = bytes_of[:, :, form.header_bytes :].view(
        num_tiles, num_groups, -1, TILE_COLUMNS, words.shape[-1]
    )
    of_codes[tile, :, :, column] = words
