"""How our kernels follow each other on the device.

With programmatic dependent launch a kernel starts while the one before it still runs, and waits, in the kernel, before
it touches what others wrote. So the microseconds of starting up are spent beside work, and what does not depend on
others (weights) can be on its way already. Every kernel of ours waits before its first read of anything that a step
computes and before its first write; then the order of a step is as if kernels ran one after another.

Where there is no such thing, in the interpreter and before Hopper, both are nothing.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


@cache
def dependent_launch() -> dict[str, Any]:
    """What every launch of a kernel with a PDL parameter is given."""
    is_there = (
        not IS_INTERPRETED
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability()[0] >= 9
        and os.environ.get("ALIGNEDSERVE_PDL", "1") != "0"
    )
    return {"PDL": True, "launch_pdl": True} if is_there else {"PDL": False}


@triton.jit
def wait_for_dependency(PDL: tl.constexpr):
    if PDL:
        gdc_wait()


@triton.jit
def start_dependents(PDL: tl.constexpr):
    """The next kernel may start, as soon as all programs of this one have come so far."""
    if PDL:
        gdc_launch_dependents()
