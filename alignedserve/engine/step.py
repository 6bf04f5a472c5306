"""The inputs of one forward call, in buffers that stay where they are for the life of an instance.

A step is a flat run of tokens ("varlen"): sequence s owns tokens query_start[s] .. query_start[s+1], the last
query_len tokens of its context. Prefill chunks and decodes are the same thing with different query_len.
Buffers never move, so that compiled programs and CUDA graphs may hold on to their addresses.
"""

from __future__ import annotations

import torch


class StepInputs:
    def __init__(
        self, max_tokens: int, max_seqs: int, max_blocks_per_seq: int, device: torch.device | str = "cpu"
    ) -> None:
        self.max_tokens = max_tokens
        self.max_seqs = max_seqs
        self.num_tokens = 0
        self.num_seqs = 0

        def ints(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        # per token
        self.token_ids = ints(max_tokens)
        self.positions = ints(max_tokens)
        # where its K and V go: block id * block size + offset within the block
        self.slots = ints(max_tokens)
        # per sequence
        self.query_start = ints(max_seqs + 1)
        # tokens of the sequence whose KV exists after this step, its own queries included
        self.context_len = ints(max_seqs)
        self.block_table = ints(max_seqs, max_blocks_per_seq)
