"""Measures how much GPU memory KV may take: the rest beside the weights when a step is as large as it gets."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.kv.format import BlockFormat
from alignedserve.kv.groups import LayerGroups
from alignedserve.models.base import Model
from alignedserve.ops.base import Ops
from alignedserve.ops.step import StepInputs

# Memory for what grows later: CUDA graphs, work space of libraries, fragmentation.
RESERVE_BYTES = 1 << 30


# CUDA takes this for a process before its first allocation.
CONTEXT_BYTES = 512 << 20


@dataclass(frozen=True)
class MemoryUse:
    """A GPU's memory in bytes, with the weights loaded."""

    num_total: int
    # Not allocated by any process.
    num_free: int
    # Reserved by this process's tensors.
    num_own: int


def kv_bytes(
    model: Model, ops: Ops, form: BlockFormat, groups: LayerGroups, step: StepInputs, utilization: float
) -> int:
    """Measures by running one step with as many tokens as are allowed, on a temporary cache. `step` can be reused
    afterwards."""
    # The memory of temporary tensors from loading is unused, but still reserved by this process.
    torch.cuda.empty_cache()
    num_free, num_total = torch.cuda.mem_get_info(ops.device)
    use = MemoryUse(num_total, num_free, torch.cuda.memory_reserved(ops.device))
    return kv_share(use, _work_bytes(model, ops, form, groups, step), utilization)


def kv_share(use: MemoryUse, num_work: int, utilization: float) -> int:
    """The rest of this process's share, but no more than other processes on the GPU leave free."""
    share = int(use.num_total * utilization) - use.num_own - CONTEXT_BYTES
    return min(share, use.num_free) - num_work - RESERVE_BYTES


@torch.inference_mode()
def _work_bytes(model: Model, ops: Ops, form: BlockFormat, groups: LayerGroups, step: StepInputs) -> int:
    longest = min(step.max_blocks_per_seq * form.block_size, step.max_tokens)
    chunks = [longest] * (step.max_tokens // longest)
    # All groups use the same blocks.
    shape = (form.num_columns(longest), *form.shape)
    cache = torch.empty(shape, dtype=getattr(torch, form.torch_dtype), device=ops.device)
    ops.bind_cache(cache, groups=groups)
    compiled = ops.compile(model.forward, model.logits, step, max_rows=step.max_seqs, is_trial=True)
    _fill(step, chunks, form)
    torch.cuda.reset_peak_memory_stats(ops.device)
    before = torch.cuda.memory_allocated(ops.device)
    compiled.forward()
    compiled.logits(torch.zeros(step.max_seqs, dtype=torch.int32))
    torch.cuda.synchronize(ops.device)
    peak = torch.cuda.max_memory_allocated(ops.device)
    del compiled
    torch.cuda.empty_cache()
    return peak - before


def _fill(step: StepInputs, chunks: list[int], form: BlockFormat) -> None:
    """Fills in prompts from their first token. All use the same blocks in all groups, because the results don't
    matter."""
    step.wait_until_sent()
    host, start = step.host, 0
    host.query_start[0] = 0
    table = step.host_block_table(len(chunks), form.num_columns(chunks[0]))
    for seq, count in enumerate(chunks):
        end = start + count
        host.token_ids[start:end] = 0
        host.positions[start:end] = range(count)
        host.slots[:, start:end] = range(count)
        host.context_len[seq], host.query_start[seq + 1] = count, end
        table[seq] = range(table.shape[2])
        start = end
    host.outputs[0] = 0
    step.commit(start, len(chunks), 1)
