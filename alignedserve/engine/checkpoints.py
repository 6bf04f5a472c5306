"""Host memory for KV that is about to be overwritten in a block shared from both ends.

A part is as large as a block. It holds some of the block's slots, at their places. Copies run in order
with computation: they contain everything computed before, and later steps see what was restored.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from alignedserve.types import BlockId, RequestId


class Checkpoints:
    def __init__(self, ranks: Sequence[torch.Tensor], num_parts: int) -> None:
        """`ranks`: the cache's blocks, by rank."""
        # Slots are the dimension before the last: [layer, k|v, kv_head, slot, head_dim].
        self._block_size = ranks[0].shape[-2]
        self._bytes_per_token = sum(blocks[0].nbytes for blocks in ranks) // self._block_size
        self._num_parts = num_parts
        # By rank: the cache's blocks, and the parts.
        self._ranks = [(blocks, _empty_parts(blocks, num_parts)) for blocks in ranks]
        self._free = [*range(num_parts)]
        self._held: dict[RequestId, dict[int, int]] = {}

    def save(self, owner: RequestId, index: int, block: BlockId, first: int, end: int) -> int:
        """Copies tokens `first` to `end` of the owner's block, which is filled from the last slot down. Returns the
        number of bytes."""
        held = self._held.setdefault(owner, {})
        if index not in held:
            if not self._free:
                raise RuntimeError(
                    f"{owner}: no part is free to keep block {index}, all {self._num_parts} are taken"
                )
            held[index] = self._free.pop()
        slots = self._slots(first, end)
        for blocks, parts in self._ranks:
            parts[held[index]][..., slots, :].copy_(blocks[block][..., slots, :])
        return (end - first) * self._bytes_per_token

    def restore(self, owner: RequestId, index: int, block: BlockId, first: int, end: int) -> int:
        """Copies the tokens back, and frees the part. Returns the number of bytes."""
        part, slots = self._held[owner].pop(index), self._slots(first, end)
        for blocks, parts in self._ranks:
            blocks[block][..., slots, :].copy_(parts[part][..., slots, :])
        self._free.append(part)
        if not self._held[owner]:
            del self._held[owner]
        return (end - first) * self._bytes_per_token

    def drop(self, owner: RequestId) -> None:
        """Frees all parts of the owner. Safe to repeat."""
        self._free += self._held.pop(owner, {}).values()

    def reset(self) -> None:
        """Frees all parts."""
        self._held.clear()
        self._free = [*range(self._num_parts)]

    def _slots(self, first: int, end: int) -> slice:
        return slice(self._block_size - end, self._block_size - first)

    def check_idle(self) -> None:
        if self._held or len(self._free) != self._num_parts:
            raise RuntimeError(
                f"idle, but {self._num_parts - len(self._free)} parts of blocks are held: {[*self._held]}"
            )


def _empty_parts(blocks: torch.Tensor, num_parts: int) -> torch.Tensor:
    shape = (num_parts, *blocks.shape[1:])
    return torch.empty(shape, dtype=blocks.dtype, pin_memory=blocks.device.type == "cuda")
