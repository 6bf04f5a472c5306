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
    # Whether a request's inputs may be kept in place of its KV.
    can_keep_inputs: bool = False
