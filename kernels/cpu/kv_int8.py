"""Converts KV blocks to and from the pool's int8 format, on the calling thread only and without Python's lock.

dtypes: float32, bfloat16. `kernels/kv_int8.py` defines the arithmetic; its functions give the same bytes.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from alignedserve.kernels.cpu.library import library
from alignedserve.kernels.cpu.structs import DTYPE_CODES, KvBlocks
from alignedserve.kernels.kv_int8 import check


def quantise(kv: torch.Tensor, stored: torch.Tensor, num_last_slots: int) -> None:
    """Stores the blocks. Only the first `num_last_slots` slots of the last block are filled."""
    _run(library().quantise_kv, kv, stored, num_last_slots)


def dequantise(stored: torch.Tensor, kv: torch.Tensor) -> None:
    """Restores the blocks."""
    _run(library().dequantise_kv, kv, stored, kv.shape[4])


def is_native(dtype: torch.dtype) -> bool:
    """Returns whether a kernel exists for this dtype. It may still have to be compiled."""
    return _name(dtype) in DTYPE_CODES


def _run(function: Any, kv: torch.Tensor, stored: torch.Tensor, num_last_slots: int) -> None:
    check(kv, stored, num_last_slots)
    if kv.device.type != "cpu" or not is_native(kv.dtype):
        raise ValueError(f"kv must be float32 or bfloat16 on the CPU, not {kv.dtype} on {kv.device}")
    num_blocks, num_layers, _, num_kv_heads, num_slots, head_dim = kv.shape
    blocks = KvBlocks(
        values=kv.data_ptr(),
        stored=stored.data_ptr(),
        num_blocks=num_blocks,
        num_groups=num_layers * 2 * num_kv_heads,
        num_slots=num_slots,
        head_dim=head_dim,
        num_last_slots=num_last_slots,
        dtype=DTYPE_CODES[_name(kv.dtype)],
    )
    if function(ctypes.byref(blocks)) != 0:
        raise ValueError(f"kv has dtype {kv.dtype}, which the kernel does not support")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
