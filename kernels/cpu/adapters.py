"""The adapters of a linear layer, in the layout that the kernels read (csrc/adapters.cpp)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.kernels.cpu.arena import Arena
from alignedserve.kernels.cpu.experts import ExpertPacker
from alignedserve.kernels.cpu.groups import TILE_COLUMNS
from alignedserve.kernels.cpu.structs import ActivationCode
from alignedserve.kernels.cpu.weights import PackedAdapters, PackedWeight, columns_of_parts, num_tiles, pack


def pack_adapters(
    a: Sequence[torch.Tensor],
    b: Sequence[torch.Tensor],
    scales: Sequence[float],
    activation: ActivationCode,
    dtype: torch.dtype,
    arena: Arena,
) -> PackedAdapters:
    """`a` and `b`: one per part of the layer, [adapters, rank, in] and [adapters, rank, out]. `activation`: the
    layer's; it determines the order of columns."""
    num_adapters, rank, _ = a[0].shape

    def pack_a(
        parts: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None, region: Arena
    ) -> PackedWeight:
        return pack(parts, biases, ActivationCode.NONE, dtype, region)

    packer = ExpertPacker(num_adapters, pack_a, arena)
    for number in range(num_adapters):
        packer.add([each[number] for each in a])
    widths = [each.shape[2] for each in b]
    num_columns = num_tiles(widths, activation) * TILE_COLUMNS
    expand = torch.zeros(num_adapters, rank, num_columns, dtype=dtype)
    # Columns of the tiles without a part are zeros.
    parts = torch.full((num_columns,), len(b) - 1, dtype=torch.int32)
    for part, columns in enumerate(columns_of_parts(widths, activation)):
        expand[:, :, columns] = b[part].to(dtype)
        parts[columns] = part
    return PackedAdapters(packer.finish(), expand, torch.tensor(scales, dtype=torch.float32), parts)
