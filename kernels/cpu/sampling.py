"""Greedy and Gumbel-max sampling of float32 logits.

Gumbel-max: the token is argmax_j logits[j] + g(key, j), a sample of softmax(logits). Its noise is a function of (key,
j) only:

    g = -log(-log1p(-u)),  u = (h + 0.5) * 2**-32 in float32,  h = mix(mix(j ^ low(key)) ^ high(key))

`mix` is the 32-bit integer hash "lowbias32". u is kept below one, because the last 128 hashes would round to one. Their
noise would be -inf, but the noise of the only allowed token must be finite. `gumbel_argmax_torch` does the same in
plain torch, for any device. The two agree up to the rounding of the logarithms.
"""

from __future__ import annotations

import torch

from alignedserve.kernels.cpu.library import library

_MASK = 0xFFFFFFFF


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns, per row, the index (int64) of the first maximum, and whether there is a NaN or the maximum is not
    finite."""
    _check_logits(logits)
    num_rows, width = logits.shape
    index = torch.empty(num_rows, dtype=torch.int64)
    is_bad = torch.empty(num_rows, dtype=torch.bool)
    library().argmax_rows(
        logits.data_ptr(),
        num_rows,
        width,
        logits.stride(0),
        index.data_ptr(),
        is_bad.data_ptr(),
        torch.get_num_threads(),
    )
    return index, is_bad


def gumbel_argmax(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the sampled index (int64) per row of logits and its key. Logits are scaled by temperature; -inf is
    never sampled."""
    _check_logits(logits)
    _check_keys(logits, keys)
    num_rows, width = logits.shape
    index = torch.empty(num_rows, dtype=torch.int64)
    library().gumbel_argmax_rows(
        logits.data_ptr(),
        num_rows,
        width,
        logits.stride(0),
        keys.data_ptr(),
        index.data_ptr(),
        torch.get_num_threads(),
    )
    return index


def gumbel_argmax_torch(logits: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """The reference of `gumbel_argmax`, for any device."""
    return (logits + gumbel_noise_torch(keys, logits.shape[1])).argmax(dim=1)


def gumbel_noise_torch(keys: torch.Tensor, width: int) -> torch.Tensor:
    """Returns float32 noise of shape [len(keys), width]."""
    column = torch.arange(width, dtype=torch.int64, device=keys.device)
    low, high = keys.unsqueeze(1) & _MASK, (keys.unsqueeze(1) >> 32) & _MASK
    hashed = _mix(_mix(column ^ low) ^ high)
    u = ((hashed.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log(-torch.log1p(-u))


def _mix(x: torch.Tensor) -> torch.Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x7FEB352D) & _MASK
    x = x ^ (x >> 15)
    x = (x * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32 or logits.device.type != "cpu":
        raise ValueError(f"logits must be float32 on the CPU, not {logits.dtype} on {logits.device}")
    if logits.dim() != 2 or logits.shape[1] == 0 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [rows, vocab] with contiguous rows, not {tuple(logits.shape)}")


def _check_keys(logits: torch.Tensor, keys: torch.Tensor) -> None:
    if keys.dtype != torch.int64 or keys.device.type != "cpu" or not keys.is_contiguous():
        raise ValueError(f"keys must be contiguous int64 on the CPU, not {keys.dtype} on {keys.device}")
    if keys.shape != logits.shape[:1]:
        raise ValueError(f"keys must be one per row of logits ({logits.shape[0]}), not {tuple(keys.shape)}")
