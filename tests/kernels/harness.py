"""Runs single operations, and compares what a backend computes with the float32 reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from alignedserve.ops.base import Ops
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_ops import TorchOps

DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}


def evaluate(
    ops: Ops, x: torch.Tensor, operation: Callable[[Any], Any], adapters: Sequence[int] | None = None
) -> torch.Tensor:
    """operation(x) for x [rows, width], brought in as an embedding of its own row numbers. `adapters`: of each row."""
    rows, width = x.shape
    step = StepInputs(max_tokens=max(rows, 1), max_seqs=1, max_blocks_per_seq=1, has_adapters=True)
    step.token_ids[:rows] = torch.arange(rows)
    if adapters is not None and step.adapters:
        step.adapters.fill(np.array(adapters), np.ones(rows, dtype=np.int32), np.arange(0))
    step.commit(rows, 0, 0)
    table = ops.parameter(x if rows else torch.zeros(1, width))
    identity = ops.linear_weight([torch.eye(1)])
    model = ops.compile(
        lambda step: operation(ops.embed(table, step.token_ids)),
        lambda hidden: ops.linear(ops.embed(ops.parameter(torch.ones(1, 1)), step.positions), identity),
        step,
        max_rows=1,
    )
    return model.forward().clone()


def randn(*size: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values that `dtype` can hold, as float32."""
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(dtype).float()


def reference(x: torch.Tensor, operation: Callable[[Ops, Any], Any]) -> torch.Tensor:
    ops = TorchOps(torch.float32)
    return evaluate(ops, x, lambda value: operation(ops, value))


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Within the dtype's tolerance of the largest value."""
    assert actual.shape == expected.shape
    assert not actual.isnan().any()
    if expected.numel():
        error = (actual.float() - expected).abs().max() / expected.abs().max()
        assert error <= TOLERANCE[actual.dtype], f"relative error {error:.2e}"
