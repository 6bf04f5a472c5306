"""The bytes of KV blocks: those on the device, and the copies of preempted requests' blocks in host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from alignedserve.kv_format import BlockFormat
from alignedserve.types import BlockId, RequestId


class KVCache:
    def __init__(
        self,
        form: BlockFormat,
        num_blocks: int,
        device: torch.device,
        allocate: Callable[..., torch.Tensor] = torch.empty,
    ) -> None:
        self.format = form
        # Not cleared: nothing reads a slot before it is written. On a CPU, pages cost nothing until then.
        self.blocks = allocate((num_blocks, *form.shape), dtype=getattr(torch, form.dtype), device=device)
        self._saved: dict[RequestId, torch.Tensor] = {}

    def save(self, owner: RequestId, blocks: Sequence[BlockId]) -> None:
        """Copies a preempted request's blocks to host memory, where they stay until `restore` or `drop`."""
        if owner in self._saved:
            raise RuntimeError(f"{owner}: saved twice")
        self._saved[owner] = self.blocks[list(blocks)].cpu()

    def restore(self, owner: RequestId, blocks: Sequence[BlockId]) -> None:
        """Copies them back into the first of `blocks`; the copy in host memory is gone."""
        saved = self._saved.pop(owner)
        if len(saved) > len(blocks):
            raise RuntimeError(f"{owner}: {len(saved)} blocks saved, only {len(blocks)} to restore to")
        self.blocks[list(blocks[: len(saved)])] = saved.to(self.blocks.device)

    def drop(self, owner: RequestId) -> None:
        """Forgets a saved copy; safe to repeat."""
        self._saved.pop(owner, None)

    def reset(self) -> None:
        """Forgets all saved copies."""
        self._saved.clear()

    @property
    def num_saved_blocks(self) -> int:
        return sum(map(len, self._saved.values()))
