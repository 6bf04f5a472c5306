"""A step's small messages to and from the host, by kernels that read and write pinned memory.

The device's copy engines could copy them, too, but they run one copy after the other. Behind megabytes of KV, a step
would wait milliseconds for its few kilobytes.

`receive`: source (pinned) to target, both int32; source[0] is the number of values.
Grid: (NUM_PROGRAMS,).
`send_tokens`: tokens [rows] int64 and is_broken [rows] bool to out (pinned) int32, -1 where broken.
Grid: (rows / 256,).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

NUM_PROGRAMS = 64
BLOCK = 1024


def receive(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copies after all kernels launched before it, so that none of their inputs change while they run."""
    if source.dtype != torch.int32 or target.dtype != torch.int32 or len(source) > len(target):
        raise ValueError(f"source must be int32 and fit target, not {len(source)} of {source.dtype}")
    _receive_kernel[(NUM_PROGRAMS,)](source, target, BLOCK=BLOCK, num_warps=4)


@triton.jit
def _receive_kernel(source, target, BLOCK: tl.constexpr):
    count = tl.load(source)
    for start in range(tl.program_id(0) * BLOCK, count, tl.num_programs(0) * BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(target + at, tl.load(source + at, mask=at < count), mask=at < count)


def send_tokens(tokens: torch.Tensor, is_broken: torch.Tensor, out: torch.Tensor) -> None:
    if tokens.shape != is_broken.shape or len(out) < len(tokens) or out.dtype != torch.int32:
        raise ValueError(f"out must be int32 and hold {len(tokens)}, not {len(out)} of {out.dtype}")
    grid = (triton.cdiv(len(tokens), 256),)
    _send_tokens_kernel[grid](tokens, is_broken, out, len(tokens), BLOCK=256, num_warps=1)


@triton.jit(do_not_specialize=["num_rows"])
def _send_tokens_kernel(tokens, is_broken, out, num_rows, BLOCK: tl.constexpr):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < num_rows
    token = tl.load(tokens + row, mask=mask, other=0).to(tl.int32)
    tl.store(out + row, tl.where(tl.load(is_broken + row, mask=mask, other=0) != 0, -1, token), mask=mask)
