"""The inputs of one forward call, in buffers that stay where they are for the life of an instance.

A step is a flat run of tokens ("varlen"): sequence s owns tokens query_start[s] .. query_start[s+1], the last
query_len tokens of its context. Prefill chunks and decodes are the same thing with different query_len.
Of most tokens only the KV is wanted; hidden states go on only for the outputs, chosen beforehand.
Buffers never move, so that compiled programs and CUDA graphs may hold on to their addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True)
class HostStep:
    """The same buffers as numpy arrays on the host: what the engine fills in."""

    token_ids: np.ndarray
    positions: np.ndarray
    slots: np.ndarray
    outputs: np.ndarray
    query_start: np.ndarray
    context_len: np.ndarray


class StepInputs:
    """On a GPU all of them are one buffer, filled in pinned memory and sent in one piece by `upload`."""

    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks_per_seq: int, device: torch.device | str = "cpu"
    ) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.max_blocks_per_seq = max_blocks_per_seq
        self.num_tokens = 0
        self.num_outputs = 0
        self.num_seqs = 0
        sizes = {
            # numbers that there are to send
            "num_used": 1,
            "table_stride": 1,
            "query_start": max_seqs + 1,
            "context_len": max_seqs,
            # chunks only: where each one's context begins among theirs; see num_decodes
            "context_start": max_seqs + 1,
            "token_ids": max_tokens,
            "positions": max_tokens,
            "slots": max_tokens,
            "outputs": max_tokens,
            "block_table": max_seqs * max_blocks_per_seq,
        }
        offsets = _offsets(sizes)
        self._table_offset = offsets["block_table"]
        size = self._table_offset + sizes["block_table"]
        self._device_buffer = torch.zeros(size, dtype=torch.int32, device=device)
        is_on_host = self._device_buffer.device.type == "cpu"
        self._host_buffer = self._device_buffer if is_on_host else torch.zeros_like(
            self._device_buffer, device="cpu"
        ).pin_memory()  # fmt: skip

        def view(name: str) -> torch.Tensor:
            return self._device_buffer[offsets[name] : offsets[name] + sizes[name]]

        def host_view(name: str) -> np.ndarray:
            array: np.ndarray = self._host_buffer[offsets[name] : offsets[name] + sizes[name]].numpy()
            return array

        # per token
        self.token_ids = view("token_ids")
        self.positions = view("positions")
        # where its K and V go: block id * block size + offset within the block
        self.slots = view("slots")
        # per output: which token. Ascending, and a run of each sequence's tokens (or none of them).
        self.outputs = view("outputs")
        # per sequence
        self.query_start = view("query_start")
        # tokens of the sequence whose KV exists after this step, its own queries included
        self.context_len = view("context_len")
        self.context_start = view("context_start")
        # sequence s's blocks begin at s * table_stride: rows are as wide as this step needs
        self.flat_block_table = view("block_table")
        self.table_stride = view("table_stride")
        names = ("token_ids", "positions", "slots", "outputs", "query_start", "context_len")
        self.host = HostStep(**{name: host_view(name) for name in names})
        self._num_used = host_view("num_used")
        self._host_stride = host_view("table_stride")
        self._host_context_start = host_view("context_start")
        self._host_table = host_view("block_table")
        # how wide rows of the block table are
        self.num_columns = max_blocks_per_seq
        # how the host's buffer comes to the device's: (host, device)
        self.send: Callable[[torch.Tensor, torch.Tensor], object] = self._copy
        self._sent = None if is_on_host else torch.cuda.Event()  # type: ignore[no-untyped-call]
        # sizes that a step of decodes is filled up to, ascending: those that there are CUDA graphs for
        self.padded_sizes: list[int] = []
        # rows beyond the tokens that fill the step up
        self.num_padding = 0
        # leading sequences that compute one token
        self.num_decodes = 0

    def host_block_table(self, num_seqs: int, num_columns: int) -> np.ndarray:
        """[num_seqs, num_columns] to be filled in, whatever was there before."""
        if self._device_buffer is self._host_buffer:
            # native programs were told the width once
            return self._host_table.reshape(self.max_seqs, -1)[:num_seqs, :num_columns]
        self.num_columns = num_columns
        return self._host_table[: num_seqs * num_columns].reshape(num_seqs, num_columns)

    @property
    def block_table(self) -> torch.Tensor:
        """[num_seqs, columns]"""
        rows = len(self.flat_block_table) // self.num_columns
        return self.flat_block_table[: rows * self.num_columns].view(rows, self.num_columns)

    def output_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.is_decode else x[self.outputs[: self.num_outputs].long()]

    @property
    def num_rows(self) -> int:
        """Tokens, and what fills them up."""
        return self.num_tokens + self.num_padding

    @property
    def is_decode(self) -> bool:
        """Every sequence computes one token and wants its output: rows of outputs are rows of tokens."""
        return self.num_tokens == self.num_seqs == self.num_outputs

    @property
    def has_chunks(self) -> bool:
        return self.num_decodes < self.num_seqs

    def commit(self, num_tokens: int, num_seqs: int, num_outputs: int) -> None:
        """Declares what the host buffers hold."""
        self.num_tokens, self.num_seqs, self.num_outputs = num_tokens, num_seqs, num_outputs
        self._host_stride[0] = self.num_columns
        if self.is_decode:
            self.num_decodes = num_seqs
            self._pad()
        else:
            self._count_decodes()
        self._num_used[0] = self._table_offset + num_seqs * self.num_columns

    def commit_padding(self) -> None:
        """A step of decodes without any: for capturing graphs."""
        self.num_tokens = self.num_seqs = self.num_outputs = 0
        self._host_stride[0] = self.num_columns = 1
        self._pad()
        self.num_decodes = self.num_rows
        self._num_used[0] = self._table_offset

    def _pad(self) -> None:
        """Rows that write nothing and attend to nothing."""
        num = self.num_seqs
        self.host.query_start[0] = 0
        size = next((size for size in self.padded_sizes if size >= num), num)
        self.num_padding = size - num
        padding = slice(num, size)
        self.host.token_ids[padding] = 0
        self.host.positions[padding] = 0
        self.host.slots[padding] = -1
        self.host.context_len[padding] = 0
        self.host.query_start[num + 1 : size + 1] = np.arange(num + 1, size + 1)

    def _count_decodes(self) -> None:
        self.num_padding = 0
        lengths = np.diff(self.host.query_start[: self.num_seqs + 1])
        is_chunk = np.flatnonzero(lengths != 1)
        self.num_decodes = first = int(is_chunk[0]) if len(is_chunk) else self.num_seqs
        contexts = self.host.context_len[first : self.num_seqs]
        self._host_context_start[0] = 0
        np.cumsum(contexts, out=self._host_context_start[1 : len(contexts) + 1])

    def upload(self) -> None:
        """To the device, on the current stream. The host's buffers are to be left alone until `wait_until_sent`."""
        if self._sent is not None:
            self.send(self._host_buffer, self._device_buffer)

    def mark_sent(self) -> None:
        """What sends them has been launched."""
        if self._sent is not None:
            self._sent.record()

    def wait_until_sent(self) -> None:
        """Before the host's buffers are filled again."""
        if self._sent is not None:
            self._sent.synchronize()

    def _copy(self, host: torch.Tensor, device: torch.Tensor) -> None:
        used = int(self._num_used[0])
        device[:used].copy_(host[:used], non_blocking=True)

    @property
    def num_chunk_context(self) -> int:
        """Tokens of all chunks' contexts."""
        return int(self._host_context_start[self.num_seqs - self.num_decodes])


def _offsets(sizes: dict[str, int]) -> dict[str, int]:
    """Each begins at a multiple of 16 bytes, which kernels are compiled for."""
    offsets, end = {}, 0
    for name, size in sizes.items():
        offsets[name] = end
        end += -(-size // 4) * 4
    return offsets
