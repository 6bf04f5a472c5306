"""How the kernels of a step of one sequence follow each other.

With programmatic dependent launch a kernel starts while the previous one still runs. It waits, inside the kernel,
before it touches memory that other kernels write. The microseconds of a launch thus overlap with work, and weights,
which depend on no kernel, can be loaded early. Each of these kernels waits before its first read of a step's results
and before its first write. The order of a step is therefore the same as if kernels ran one after another.

It is for the kernels of batch 1, where launches are a tenth of a step. Decode attention does not use it: on an H200,
the next kernel, started early, cost it more time than it gained.

If it is not available, in the interpreter and before Hopper, both functions do nothing.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@cache
def dependent_launch() -> dict[str, Any]:
    """Returns the extra arguments of every launch of a kernel with a PDL parameter."""
    is_there = (
        not knobs.runtime.interpret
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] >= 9
    )
    return {"PDL": True, "launch_pdl": True} if is_there else {"PDL": False}


@triton.jit
def wait_for_dependency(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def start_dependents(PDL: tl.constexpr):
    """Lets the next kernel start, once all programs of this one have called this."""
    if PDL:
        gdc_launch_dependents()
