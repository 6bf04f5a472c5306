"""Four-bit weights, made of others. `quantised.py` has the arithmetic.

A weight's inputs are in groups of 32. Each group of each output has a bfloat16 scale: minus an eighth of the value with
the largest magnitude, which gets code 0. Codes are round(weight / scale) + 8, from 0 to 15.
"""

from __future__ import annotations

import torch

from alignedserve.kernels.quantised import INT4, QuantisedWeight

GROUP, ZERO, LARGEST_CODE = 32, 8, 15
# Bytes of a weight, with its share of the scale.
BYTES_PER_WEIGHT = 0.5 + 2 / GROUP
_NUM_AT_ONCE = 1024


def quantise_int4(weight: torch.Tensor) -> QuantisedWeight:
    codes, scales = quantise_groups(weight)
    return QuantisedWeight(INT4, codes.flatten(1)[:, : weight.shape[1]], scales, None, GROUP)


def quantise_groups(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns uint8 codes [out, groups, 32] and bfloat16 scales [out, groups] of a weight [out, in]. The last group
    is padded with zeros. Raises ValueError if the weight is not finite."""
    num_out, num_in = weight.shape
    num_groups = -(-num_in // GROUP)
    codes = torch.empty(num_out, num_groups, GROUP, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(num_out, num_groups, dtype=torch.bfloat16, device=weight.device)
    for first in range(0, num_out, _NUM_AT_ONCE):
        piece = slice(first, first + _NUM_AT_ONCE)
        values = torch.nn.functional.pad(weight[piece].float(), (0, num_groups * GROUP - num_in))
        codes[piece], scales[piece] = _of_groups(values.view(-1, num_groups, GROUP))
    if not scales.isfinite().all():
        raise ValueError("a weight that is not finite can't be quantized to 4 bits")
    return codes, scales


def _of_groups(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    at = values.abs().argmax(2, keepdim=True)
    scales = (values.gather(2, at) / -ZERO).bfloat16()
    inverse = torch.where(scales != 0, 1 / scales.float(), 0.0)
    codes = ((values * inverse).round() + ZERO).clamp(0, LARGEST_CODE)
    return codes.to(torch.uint8), scales.squeeze(2)
