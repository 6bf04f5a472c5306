"""The inputs of one forward call, in buffers that stay where they are for the life of an instance.

A step is a flat run of tokens ("varlen"): sequence s owns tokens query_start[s] .. query_start[s+1], the last
query_len tokens of its context. Prefill chunks and decodes are the same thing with different query_len.
Of most tokens only the KV is wanted; hidden states go on only for the outputs, chosen beforehand.
Buffers never move, so that compiled programs and CUDA graphs may hold on to their addresses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

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
    block_table: np.ndarray


class StepInputs:
    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks_per_seq: int, device: torch.device | str = "cpu"
    ) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.num_tokens = 0
        self.num_outputs = 0
        self.num_seqs = 0
        self._is_on_host = torch.device(device).type == "cpu"
        self._staging: dict[str, torch.Tensor] = {}

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        # per token
        self.token_ids = ints(max_tokens)
        self.positions = ints(max_tokens)
        # where its K and V go: block id * block size + offset within the block
        self.slots = ints(max_tokens)
        # per output: which token. Ascending, and a run of each sequence's tokens (or none of them).
        self.outputs = ints(max_tokens)
        # per sequence
        self.query_start = ints(max_seqs + 1)
        # tokens of the sequence whose KV exists after this step, its own queries included
        self.context_len = ints(max_seqs)
        self.block_table = ints(max_seqs, max_blocks_per_seq)
        self.host = self._host_buffers()

    def _host_buffers(self) -> HostStep:
        names = [field.name for field in fields(HostStep)]
        if not self._is_on_host:
            self._staging = {name: getattr(self, name).cpu().pin_memory() for name in names}
        return HostStep(**{name: self._staging.get(name, getattr(self, name)).numpy() for name in names})

    def output_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[self.outputs[: self.num_outputs].long()]

    def commit(self, num_tokens: int, num_seqs: int, num_outputs: int) -> None:
        """Declares what the host buffers hold; on a GPU, starts their upload on the current stream."""
        self.num_tokens, self.num_seqs, self.num_outputs = num_tokens, num_seqs, num_outputs
        if self._is_on_host:
            return
        counts = {
            "outputs": num_outputs,
            "query_start": num_seqs + 1,
            "context_len": num_seqs,
            "block_table": num_seqs,
        }
        for name, source in self._staging.items():
            count = counts.get(name, num_tokens)
            getattr(self, name)[:count].copy_(source[:count], non_blocking=True)
