"""The bytes of KV blocks, on the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from alignedserve.kernels.kv_rows import as_movable, to_rows
from alignedserve.protocol.kv_format import BlockFormat
from alignedserve.types import BlockId


class KVCache:
    def __init__(
        self,
        form: BlockFormat,
        num_blocks: int,
        device: torch.device,
        allocate: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        self.format = form
        # The blocks are not cleared: nothing reads a slot before it is written. On a CPU, pages cost nothing until
        # then.
        self.blocks = allocate(
            (num_blocks, *form.shape), dtype=getattr(torch, form.torch_dtype), device=device
        )

    def fill(self, blocks: Sequence[BlockId], values: torch.Tensor) -> None:
        """Writes these values, [layer, k|v, kv_head, slot, head_dim], into each of the blocks."""
        rows = to_rows(values, self.blocks.dtype).to(self.blocks.device)
        as_movable(self.blocks)[list(blocks)] = as_movable(rows)
