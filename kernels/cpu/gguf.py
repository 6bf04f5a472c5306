"""Weights in the types of GGUF files, in the tiles of csrc/gguf.h."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.kernels.cpu.groups import TILE_COLUMNS
from alignedserve.kernels.gguf import TYPES, Blocks, BlockType, GgufWeight

_PIECE = 256
# Columns of gate, and then of up, in a tile.
_RUN = 16


def tile_bytes(name: str, num_values: int) -> int:
    """The bytes of a tile of 32 columns with this number of inputs."""
    return TILE_COLUMNS * TYPES[name].bytes_of(num_values)


def pack_gguf(parts: Sequence[GgufWeight], is_gated: bool, tiles: torch.Tensor) -> None:
    """Writes the outputs of parts of one type into `tiles`, [tile, bytes], side by side, or 16 of each in turn. Raises
    ValueError if a scale is not finite."""
    data = parts[0].data
    if len(parts) > 1:
        data = _in_turn(parts) if is_gated else torch.cat([part.data for part in parts])
    whole = GgufWeight(parts[0].type, data)
    for first, some in whole.pieces(TILE_COLUMNS):
        padding = -len(some.data) % TILE_COLUMNS
        padded = GgufWeight(some.type, torch.nn.functional.pad(some.data, (0, 0, 0, padding)))
        _put(padded, tiles[first // TILE_COLUMNS :][: len(padded.data) // TILE_COLUMNS])


def _in_turn(parts: Sequence[GgufWeight]) -> torch.Tensor:
    num_out, num_bytes = parts[0].data.shape
    padding = 0, 0, 0, -num_out % _RUN
    runs = [torch.nn.functional.pad(part.data, padding).view(-1, _RUN, num_bytes) for part in parts]
    return torch.stack(runs, 1).flatten(0, 2)


def _put(weight: GgufWeight, tiles: torch.Tensor) -> None:
    form, blocks = TYPES[weight.type], weight.decoded()
    for tensor in (blocks.scales, blocks.minima):
        if tensor is not None and not tensor.isfinite().all():
            raise ValueError(f"a scale of a weight in {weight.type} is not finite")
    num_whole = weight.shape[1] // _PIECE
    at = num_whole * tile_bytes(weight.type, _PIECE)
    # The last piece may be shorter than the others.
    for first, count, num_values, of_tiles in (
        (0, num_whole, _PIECE, tiles[:, :at]),
        (num_whole * _PIECE, 1, weight.shape[1] % _PIECE, tiles[:, at:]),
    ):
        if count and num_values:
            size = of_tiles.shape[1] // count
            pieces = of_tiles.unfold(1, size, size)
            _put_pieces(form, blocks, first, num_values, pieces)


def _put_pieces(form: BlockType, blocks: Blocks, first: int, num_values: int, pieces: torch.Tensor) -> None:
    """`pieces`: the bytes of inputs from `first` on, [tile, piece, byte]."""
    num_tiles, num_pieces, _ = pieces.shape
    at = 0

    def put(values: torch.Tensor, each: int) -> None:
        """Writes the values of each `each` inputs of all columns."""
        nonlocal at
        some = values[:, first // each :][:, : num_pieces * num_values // each]
        size = num_values // each * TILE_COLUMNS * values.itemsize
        to = pieces[:, :, at : at + size].view(values.dtype).view(num_tiles, num_pieces, -1, TILE_COLUMNS)
        to.copy_(some.reshape(num_tiles, TILE_COLUMNS, num_pieces, -1).permute(0, 2, 3, 1))
        at += size

    put(blocks.scales, form.values)
    if blocks.minima is not None:
        put(blocks.minima, form.values)
    if blocks.group_scales is not None and form.scale_bytes == 1 and blocks.group_minima is not None:
        put(blocks.group_scales | blocks.group_minima << 4, form.group)
    elif blocks.group_scales is not None:
        put(blocks.group_scales, form.group)
        if blocks.group_minima is not None:
            put(blocks.group_minima, form.group)
    put(_plane(blocks.codes & (1 << form.low_bits) - 1, form.low_bits), 32 // form.low_bits)
    if form.high_bits:
        put(_plane(blocks.codes >> form.low_bits, form.high_bits), 32 // form.high_bits)


def _plane(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Words with those of 8 / bits words of codes, the first in the lowest bits of each byte."""
    words = codes.contiguous().view(torch.int32).view(len(codes), -1, 8 // bits)
    plane: torch.Tensor = words[:, :, 0].clone()
    for number in range(1, words.shape[2]):
        plane |= words[:, :, number] << bits * number
    return plane
