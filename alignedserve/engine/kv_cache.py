"""The bytes of KV blocks, on the devices of an instance's ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from alignedserve.kernels.kv_rows import as_movable, to_rows
from alignedserve.kv.format import BlockFormat
from alignedserve.types import BlockId

Allocate = Callable[..., torch.Tensor]


def new_blocks(
    form: BlockFormat, num_blocks: int, device: torch.device, allocate: Allocate = torch.empty
) -> torch.Tensor:
    """One rank's part of `num_blocks` blocks: [block, layer, k|v, kv_head, slot, row]. `allocate` takes the arguments
    of torch.empty."""
    # Not cleared: every slot is written before it is read. On a CPU, a page takes no memory until then.
    return allocate((num_blocks, *form.shape), dtype=getattr(torch, form.torch_dtype), device=device)


class KVCache:
    def __init__(self, form: BlockFormat, parts: Sequence[torch.Tensor]) -> None:
        """`parts`: each rank's part of the blocks; this process's comes first."""
        self.format = form
        self.parts = tuple(parts)

    @property
    def blocks(self) -> torch.Tensor:
        """This process's part of the blocks. With one rank, it is all of them."""
        return self.parts[0]

    def copy(self, old: BlockId, new: BlockId) -> None:
        for part in self.parts:
            part[new].copy_(part[old])

    def fill(self, blocks: Sequence[BlockId], values: torch.Tensor) -> None:
        """Writes values [layer, k|v, kv_head, slot, head_dim] into each of the blocks, in every rank's part."""
        rows = to_rows(values, self.blocks.dtype)
        for part in self.parts:
            as_movable(part)[list(blocks)] = as_movable(rows.to(part.device))
