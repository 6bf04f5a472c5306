"""How the kernels of a step of one sequence follow each other.

With programmatic dependent launch a kernel starts while the one before it still runs, and waits, in the kernel, before
it touches what other kernels wrote. So the microseconds of starting up pass beside work, and weights, which depend on
no kernel, can be loaded already. Every kernel that is launched so waits before its first read of what a step computes
and before its first write: the order of a step is as if kernels ran one after another.

It is for the kernels of batch 1, where starting up is a tenth of a step. Decode attention is not launched so: measured
on an H200, the kernel after it, started early, took more time from it than it gained.

Where this does not exist, in the interpreter and before Hopper, both functions do nothing.
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
    """Returns what every launch of a kernel with a PDL parameter gets."""
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
    """Lets the next kernel start, as soon as all programs of this one have called this."""
    if PDL:
        gdc_launch_dependents()
