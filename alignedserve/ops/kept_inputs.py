"""The sequences of a step that keep the inputs of each layer in place of K and V: their places in memory.

Inputs are the values that a layer's qkv projection reads. If K is as wide as they are, they take half the memory of K
and V. A block holds inputs of twice as many tokens: [layer, 2 * block_size, width] are the same bytes as [layer, k|v,
kv_head, slot, head_dim].

In each layer, K and V of earlier tokens are *restored*: projected from their inputs into *restored KV*. It has the
layout of the cache, but one layer, since the next layer uses the same memory. The step's own K and V are written there,
too, so attention reads it like the cache of other sequences. Blocks in restored KV are assigned anew in each step.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from alignedserve.kernels.cpu.structs import Step


class KeptInputs:
    """The part of a step's inputs about kept inputs. On a GPU each buffer is filled in pinned memory."""

    def __init__(self, max_tokens: int, max_seqs: int, restored_kv: torch.Tensor) -> None:
        """`restored_kv`: memory for it, [block, 1, k|v, kv_head, slot, head_dim]."""
        self.restored_kv, device = restored_kv, restored_kv.device
        self._block_size = restored_kv.shape[4]
        self.max_restored = max_restored = len(restored_kv) * self._block_size
        self._buffers: list[tuple[torch.Tensor, torch.Tensor, Callable[[], int]]] = []
        # Sequences of the step with kept inputs.
        self.num_seqs = 0
        self._num_blocks = 0
        self._num_tokens = self._num_of_all = 0
        # Tokens with K and V to restore.
        self.num_restored = 0
        # Per sequence of the step: 1 if its inputs are kept, else 0.
        self.is_kept, self.host_is_kept = self._buffer(max_seqs, device, lambda: self._num_of_all)
        # Per token of the step, where its inputs go: block id * 2 * block_size + row within the block. -1: K and V are
        # kept instead.
        self.rows, self.host_rows = self._buffer(max_tokens, device, lambda: self._num_tokens)
        # Per restored token: where its inputs are, where its K and V go (block id * block_size + slot, in restored KV),
        # and its position.
        self.sources, self.host_sources = self._buffer(max_restored, device, lambda: self.num_restored)
        self.targets, self.host_targets = self._buffer(max_restored, device, lambda: self.num_restored)
        self.positions, self.host_positions = self._buffer(max_restored, device, lambda: self.num_restored)

    def _buffer(
        self, size: int, device: torch.device, num_used: Callable[[], int]
    ) -> tuple[torch.Tensor, np.ndarray]:
        tensor = torch.zeros(size, dtype=torch.int32, device=device)
        host = tensor if tensor.device.type == "cpu" else torch.zeros_like(tensor, device="cpu").pin_memory()
        self._buffers.append((host, tensor, num_used))
        return tensor, host.numpy()

    def begin(self) -> None:
        """Begins a step without kept inputs."""
        self.num_seqs = self.num_restored = self._num_blocks = 0

    def add(
        self, entry: int, tokens: slice, blocks: np.ndarray, num_before: int, num_after: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Adds the step's sequence `entry`. It has `blocks`, and computes positions `num_before` to `num_after`, the
        step's `tokens`.

        Returns its blocks in restored KV, and the slots of its tokens there.
        """
        if self.num_seqs == 0:
            self.host_is_kept[:] = 0
            self.host_rows[:] = -1
        block_size = self._block_size
        first, num_blocks = self._num_blocks, -(-num_after // block_size)
        if first + num_blocks > len(self.restored_kv):
            raise RuntimeError(
                f"{first + num_blocks} blocks of restored KV are needed, there are {len(self.restored_kv)}"
            )
        positions = np.arange(num_after, dtype=np.int32)
        block, row = np.divmod(positions, 2 * block_size)
        rows, slots = blocks[block] * (2 * block_size) + row, first * block_size + positions
        restored = slice(self.num_restored, self.num_restored + num_before)
        self.host_sources[restored], self.host_targets[restored] = rows[:num_before], slots[:num_before]
        self.host_positions[restored] = positions[:num_before]
        self.host_is_kept[entry] = 1
        self.host_rows[tokens] = rows[num_before:]
        self.num_seqs += 1
        self._num_blocks += num_blocks
        self.num_restored += num_before
        return np.arange(first, first + num_blocks, dtype=np.int32), slots[num_before:]

    def commit(self, num_tokens: int, num_seqs: int) -> None:
        """Sets the total numbers of tokens and sequences in the step."""
        self._num_tokens, self._num_of_all = num_tokens, num_seqs

    def describe(self, struct: Step) -> None:
        """Describes the step to the CPU's programs."""
        struct.num_restored = self.num_restored
        struct.is_kept = self.is_kept.data_ptr() if self.num_seqs else None
        struct.input_rows = self.rows.data_ptr()
        struct.restored_rows = self.sources.data_ptr()
        struct.restored_slots = self.targets.data_ptr()
        struct.restored_positions = self.positions.data_ptr()

    def upload(self) -> None:
        """Sends the host's buffers to the device, on the current stream."""
        for host, device, num_used in self._buffers if self.num_seqs else ():
            if host is not device:
                device[: num_used()].copy_(host[: num_used()], non_blocking=True)


def rows_of_layer(cache: torch.Tensor, layer: int) -> torch.Tensor:
    """A layer of the cache's blocks as inputs: [block, 2 * block_size, width]."""
    num_blocks, _, _, num_kv_heads, block_size, head_dim = cache.shape
    return cache[:, layer].view(num_blocks, 2 * block_size, num_kv_heads * head_dim)
