"""Linear layers in four bits: the arithmetic in plain torch. It is the reference of the native kernel (`cpu/`).

A weight's inputs are in groups of 32. Each group of each output has a scale in bfloat16, an eighth of the value that is
largest, whose code is 0; codes are round(weight / scale) + 8, from 0 to 15. Rows of inputs have eight bits, as in
`int8.py`. A group's sum is an exact integer; it is scaled and added in float32, in the order of groups.
"""

from __future__ import annotations

import torch

from alignedserve.kernels.int8 import quantise_rows

GROUP, ZERO, LARGEST_CODE = 32, 8, 15
# Of a weight, with its share of the scale.
BYTES_PER_WEIGHT = 0.5 + 2 / GROUP
_NUM_AT_ONCE = 1024


def quantise_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uint8 codes [out, groups, 32] and bfloat16 scales [out, groups] of a weight [out, in], whose last group
    is filled with zeros. Raises ValueError where it is not finite."""
    num_out, num_in = weight.shape
    num_groups = -(-num_in // GROUP)
    codes = torch.empty(num_out, num_groups, GROUP, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_out, num_groups, dtype=torch.bfloat16, device=weight.device)
    for first in range(0, num_out, _NUM_AT_ONCE):
        piece = slice(first, first + _NUM_AT_ONCE)
        values = torch.nn.functional.pad(weight[piece].float(), (0, num_groups * GROUP - num_in))
        codes[piece], scales[piece] = _of_groups(values.view(-1, num_groups, GROUP))
    if not scales.isfinite().all():
        raise ValueError("a weight that is not finite has no 4 bits")
    return codes, scales


def _of_groups(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = values.abs().argmax(2, keepdim=True)
    scales = (values.gather(2, at) / -ZERO).bfloat16()
    inverse = torch.where(scales != 0, 1 / scales.float(), 0.0)
    codes = ((values * inverse).round() + ZERO).clamp(0, LARGEST_CODE)
    return codes.to(torch.uint8), scales.squeeze(2)


def linear_int4(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Returns x @ weight.T + bias, in float32. Float64 holds a group's sums exactly, and what is added to them."""
    rows, of_rows = quantise_rows(x)
    num_groups = codes.shape[1]
    rows = torch.nn.functional.pad(rows, (0, num_groups * GROUP - rows.shape[1]))
    out = torch.zeros(len(rows), len(codes), device=x.device)
    for group, part in enumerate(torch.split(rows.double(), GROUP, dim=1)):
        sums = part @ (codes[:, group].double() - ZERO).T
        out = (sums * scales[:, group].double() + out.double()).float()
    out = out * of_rows.unsqueeze(1)
    return out if bias is None else out + bias.float()
