"""Products by AMX, where the processor has it: each row is what it is alone, and a process may be refused it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from alignedserve.kernels.cpu.build import cpu_features
from alignedserve.kernels.cpu.library import loaded
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.quantise import FP8, INT8
from tests.kernels.harness import evaluate, randn

ROOT = Path(__file__).parents[2]
needs_amx = pytest.mark.skipif(
    not {"amx_tile", "amx_bf16", "amx_int8"} <= set(cpu_features().split())
    or "ALIGNEDSERVE_CPU" in os.environ,
    reason="needs a processor with AMX, and kernels for this processor",
)


@needs_amx
def test_it_is_used() -> None:
    assert loaded().uses_amx


@needs_amx
@pytest.mark.parametrize("scheme", [None, INT8, FP8])
@pytest.mark.parametrize("k", [31, 64, 200])
def test_a_row_is_the_same_in_blocks_of_any_height(scheme: str | None, k: int) -> None:
    ops = CpuOps(torch.bfloat16, quantization=scheme)
    weight = ops.linear_weight([randn(40, k, seed=1)])
    x = randn(300, k, seed=2, dtype=torch.bfloat16)
    whole = evaluate(ops, x, lambda value: ops.linear(value, weight))
    for rows in (1, 2, 15, 16, 17, 31, 32, 33, 65, 257):
        some = evaluate(ops, x[:rows], lambda value: ops.linear(value, weight))
        assert torch.equal(some, whole[:rows]), rows


# Linux refuses AMX to a process with an alternate signal stack that is too small for its registers.
REFUSED = """
import ctypes
import signal

class Stack(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]

memory = ctypes.create_string_buffer(4096)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(memory), 0, len(memory))), None) == 0

import torch

from alignedserve.kernels.cpu.library import loaded
from alignedserve.ops.cpu_ops import CpuOps
from tests.kernels.harness import assert_close, evaluate, randn, reference

assert loaded().is_refused_amx
ops = CpuOps(torch.bfloat16)
matrix, x = randn(40, 96, seed=1, dtype=torch.bfloat16), randn(33, 96, seed=2, dtype=torch.bfloat16)
weight = ops.linear_weight([matrix])
assert_close(
    evaluate(ops, x, lambda value: ops.linear(value, weight)),
    reference(x, lambda torch_ops, value: torch_ops.linear(value, torch_ops.linear_weight([matrix]))),
)
"""


@needs_amx
def test_a_process_to_which_it_is_refused_computes_without_it() -> None:
    done = subprocess.run(
        [sys.executable, "-c", REFUSED], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "does not let this process use AMX" in done.stderr
