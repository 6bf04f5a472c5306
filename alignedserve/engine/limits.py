"""How much an engine computes at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    max_num_seqs: int
    # Tokens of one iteration, all requests together.
    max_num_batched_tokens: int
    # Tokens of one request in one iteration.
    max_prefill_chunk: int
    block_size: int
    # Blocks of restored KV, which the requests of an iteration share whose inputs are kept; 0: none are.
    max_restored_blocks: int = 0

    @property
    def can_keep_inputs(self) -> bool:
        return self.max_restored_blocks > 0
