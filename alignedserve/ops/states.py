"""Layers that have a state in place of K and V, and how plain torch runs them, token by token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from alignedserve.kv.groups import GroupedLayer
from alignedserve.ops.step import StepInputs

# Takes the state's values before a token, and the token's row of inputs. Returns the state after it, and its
# outputs.
Advance = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class StateSpec:
    # The layer's number in the model.
    layer: int
    # Its entry in `ModelConfig.state_bytes`. The state is in float32, and zero before the first token.
    num_bytes: int
    # The width of the outputs.
    width: int
    advance: Advance
    # Set for the last layer: only the rows of outputs are needed from it on.
    outputs_only: bool = False


def run_states(
    x: torch.Tensor, cache: torch.Tensor, step: StepInputs, spec: StateSpec, place: GroupedLayer
) -> torch.Tensor:
    """Runs each sequence's tokens one after the other, so a result does not depend on how they are cut into steps. A
    column's block gets the state after its last token here."""
    block_size, num_values = cache.shape[4], spec.num_bytes // torch.float32.itemsize
    states = cache[:, place.index].flatten(1).view(torch.float32)[:, :num_values]
    out = torch.empty(step.num_tokens, spec.width, dtype=x.dtype, device=x.device)
    blocks = step.block_table_of(place.group)
    for seq in range(step.num_seqs):
        start, end = step.host.query_start[seq : seq + 2].tolist()
        first = int(step.host.context_len[seq]) - (end - start)
        state = states.new_zeros(num_values)
        if first and start < end:
            state = states[blocks[seq, (first - 1) // block_size]].clone()
        for token, position in zip(range(start, end), range(first, first + end - start), strict=True):
            state, out[token] = spec.advance(state, x[token])
            if token + 1 == end or (position + 1) % block_size == 0:
                states[blocks[seq, position // block_size]] = state
    return step.output_rows(out) if spec.outputs_only else out
