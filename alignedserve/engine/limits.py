"""How much an engine computes at a time."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineLimits:
    max_num_seqs: int
    # Tokens of one iteration, over all requests.
    max_num_batched_tokens: int
    # Tokens of one request in one iteration.
    max_prefill_chunk: int
    block_size: int
    num_blocks: int
    # Blocks of restored KV, shared by the requests of an iteration that keep inputs. 0: no request can keep inputs.
    max_restored_blocks: int = 0

    @property
    def can_keep_inputs(self) -> bool:
        return self.max_restored_blocks > 0
