"""Linear layers in eight bits: the arithmetic in plain torch. It is the reference of the native kernel (`cpu/`).

    weight  each output has a scale: its largest absolute value over 127; codes are round(weight / scale)
    row     each row of inputs has one, too, computed at run time: a row's result depends on no other row

Sums of products of codes are exact integers, and are multiplied by both scales once. A row with a NaN or an infinity
gives NaN or infinity.
"""

from __future__ import annotations

import torch

LARGEST = 127.0
# With more inputs, a sum might not fit 32 bits.
MAX_IN_FEATURES = 65536
# Outputs quantised at a time, so that the whole weight is never in memory in float32.
_NUM_AT_ONCE = 1024


def quantise_columns(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns int8 codes [out, in] and float32 scales [out] of a weight [out, in]. Raises ValueError if it is not
    finite."""
    if weight.shape[1] > MAX_IN_FEATURES:
        raise ValueError(f"a layer of {weight.shape[1]} inputs: 8 bits take {MAX_IN_FEATURES} at most")
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), device=weight.device)
    for first in range(0, len(weight), _NUM_AT_ONCE):
        piece = slice(first, first + _NUM_AT_ONCE)
        rounded, scales[piece] = _rounded(weight[piece].float())
        codes[piece] = rounded.to(torch.int8)
    if not scales.isfinite().all():
        raise ValueError("a weight that is not finite can't be quantized to 8 bits")
    return codes, scales


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns codes [rows, in], in float32, and scales [rows]."""
    return _rounded(x.float())


def linear_int8(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns x @ weight.T + bias, in float32. Float64 holds the sums exactly."""
    rows, of_rows = quantise_rows(x)
    sums = (rows.double() @ codes.double().T).float()
    out = sums * (scales * of_rows.unsqueeze(1))
    return out if bias is None else out + bias.float()


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = x.abs().amax(1)
    # torch rounds twice when it divides a Python number by a tensor.
    inverse = torch.where(largest > 0, torch.full_like(largest, LARGEST) / largest, 0.0)
    return (x * inverse.unsqueeze(1)).round(), largest / torch.full_like(largest, LARGEST)
