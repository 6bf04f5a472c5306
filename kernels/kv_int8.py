"""The pool's format of KV blocks with `pool_kv_dtype=int8`: its arithmetic in plain torch.

This is the reference of both kernels (`cpu/kv_int8.py`, `triton/kv_int8.py`), and runs if neither is available.

    stored   uint8 [blocks, block_bytes]: bounds [layer, k|v, kv_head, low|high, head_dim] in the dtype of `kv`, then
             codes uint8 [layer, k|v, kv_head, slot, head_dim]
    kv       [blocks, layer, k|v, kv_head, slot, head_dim], float32, bfloat16 or float16

A channel is one of head_dim, of one head, of a layer's k or v, over the slots of one block. Its 256 codes are spaced
evenly between its least and its greatest value: the scale is (high - low) / 255, and low is the zero point.

- A restored value has an error of at most half the scale, before it is rounded to its dtype.
- Low and high are restored exactly, so restored values have the same codes again. A block that is stored a second
  time, unchanged, gives the same bytes.
- Only the filled slots of a block count; the codes of the others are 0.
- A channel with values within 2^-100 of each other is restored as its least value.
- A channel with a NaN or an infinity, or with a range beyond float32, is restored as NaN. A request with such KV ends
  with an error, as it would without the pool.
"""

from __future__ import annotations

import torch

NUM_STEPS = 255
# Below this, NUM_STEPS divided by the span might exceed float32.
LEAST_SPAN = 2.0**-100


def stored_bytes(kv: torch.Tensor) -> int:
    """Returns the bytes of a stored block."""
    _, num_layers, _, num_kv_heads, num_slots, head_dim = kv.shape
    return num_layers * 2 * num_kv_heads * head_dim * (num_slots + 2 * kv.element_size())


def quantise_torch(kv: torch.Tensor, stored: torch.Tensor, num_last_slots: int) -> None:
    """Stores the blocks. Only the first `num_last_slots` slots of the last block are filled."""
    check(kv, stored, num_last_slots)
    x, is_filled = kv.float(), _is_filled(kv, num_last_slots)
    # Adding zero turns a negative zero into zero, because their bytes differ.
    low = torch.where(is_filled, x, torch.inf).amin(4, keepdim=True) + 0.0
    high = torch.where(is_filled, x, -torch.inf).amax(4, keepdim=True) + 0.0
    span = high - low
    is_wide, is_bad = (span >= LEAST_SPAN) & (span < torch.inf), ~(span < torch.inf)
    high = torch.where(is_wide, high, low)
    bounds = torch.where(is_bad, torch.nan, torch.cat([low, high], 4))
    # torch rounds twice when it divides a Python number by a tensor.
    codes = ((x - low) * (torch.full_like(span, NUM_STEPS) / span)).round()
    codes = torch.where(is_filled & is_wide, codes, 0.0)
    num_blocks, num_bounds = len(kv), bounds_bytes(kv)
    stored[:, :num_bounds] = bounds.to(kv.dtype).reshape(num_blocks, -1).view(torch.uint8)
    stored[:, num_bounds:] = codes.to(torch.uint8).reshape(num_blocks, -1)


def dequantise_torch(stored: torch.Tensor, kv: torch.Tensor) -> None:
    """Restores the blocks. Values of unfilled slots are finite if their channel is."""
    check(kv, stored, num_last_slots=kv.shape[4])
    shape, num_bounds = kv.shape, bounds_bytes(kv)
    # The copy is aligned, wherever the stored block begins.
    bounds = stored[:, :num_bounds].clone().view(kv.dtype).view(*shape[:4], 2, shape[5]).float()
    low, high = bounds[:, :, :, :, :1], bounds[:, :, :, :, 1:]
    codes = stored[:, num_bounds:].reshape(shape)
    values = codes.float() * ((high - low) / NUM_STEPS) + low
    kv.copy_(torch.where(codes == NUM_STEPS, high, values))


def bounds_bytes(kv: torch.Tensor) -> int:
    """Returns the bytes of a block's bounds, which precede its codes."""
    return kv[0].numel() // kv.shape[4] * 2 * kv.element_size() if len(kv) else 0


def check(kv: torch.Tensor, stored: torch.Tensor, num_last_slots: int) -> None:
    """Raises ValueError for arguments that no kernel supports."""
    if kv.dim() != 6 or kv.shape[2] != 2 or not kv.is_contiguous():
        raise ValueError(
            f"kv must be contiguous [blocks, layer, 2, kv head, slot, head_dim], not {tuple(kv.shape)}"
        )
    expected = (len(kv), stored_bytes(kv))
    if stored.dtype != torch.uint8 or tuple(stored.shape) != expected or not stored.is_contiguous():
        raise ValueError(
            f"stored must be contiguous uint8 {list(expected)}, not {stored.dtype} {tuple(stored.shape)}"
        )
    if not 1 <= num_last_slots <= kv.shape[4]:
        raise ValueError(f"num_last_slots must be from 1 to {kv.shape[4]}, not {num_last_slots}")


def _is_filled(kv: torch.Tensor, num_last_slots: int) -> torch.Tensor:
    filled = torch.ones((len(kv), 1, 1, 1, kv.shape[4], 1), dtype=torch.bool, device=kv.device)
    filled[-1:, ..., num_last_slots:, :] = False
    return filled
