"""The bytes of KV blocks, on the devices of an instance's ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from alignedserve.kernels.kv_rows import as_movable, to_rows
from alignedserve.protocol.kv_format import BlockFormat
from alignedserve.types import BlockId

Allocate = Callable[..., torch.Tensor]


def new_blocks(
    form: BlockFormat, num_blocks: int, device: torch.device, allocate: Allocate = torch.empty
) -> torch.Tensor:
    """One rank's part of so many blocks: [block, layer, k|v, kv_head, slot, row]. `allocate` has the arguments of
    torch.empty."""
    # The blocks are not cleared: nothing reads a slot before it is written. On a CPU, pages cost nothing until then.
    return allocate((num_blocks, *form.shape), dtype=getattr(torch, form.torch_dtype), device=device)


class KVCache:
    def __init__(self, form: BlockFormat, parts: Sequence[torch.Tensor]) -> None:
        """`parts`: the blocks as each rank has them, this process's first."""
        self.format = form
        self.parts = tuple(parts)

    @property
    def blocks(self) -> torch.Tensor:
        """What this process has of the blocks, which is all of them where there is one rank."""
        return self.parts[0]

    def copy(self, old: BlockId, new: BlockId) -> None:
        for part in self.parts:
            part[new].copy_(part[old])

    def fill(self, blocks: Sequence[BlockId], values: torch.Tensor) -> None:
        """Writes these values, [layer, k|v, kv_head, slot, head_dim], into each rank's part of each of the blocks."""
        rows = to_rows(values, self.blocks.dtype)
        for part in self.parts:
            as_movable(part)[list(blocks)] = as_movable(rows.to(part.device))
