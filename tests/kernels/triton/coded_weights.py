"""Random weights in codes."""

from __future__ import annotations

import torch

from alignedserve.kernels.quantised import FP8, FP8_DTYPE, INT4, MXFP4, QuantisedWeight


def random_weight(
    kind: str,
    group: int,
    has_zeros: bool,
    num_in: int,
    num_out: int,
    scale_dtype: torch.dtype = torch.float32,
) -> QuantisedWeight:
    num_groups = -(-num_in // group)
    if kind == MXFP4:
        codes = torch.randint(0, 16, (num_out, num_in), dtype=torch.uint8)
        return QuantisedWeight(
            kind, codes, torch.exp2(torch.randint(-6, -3, (num_out, num_groups))).bfloat16(), None, group
        )
    scales = (torch.rand(num_out, num_groups) + 0.5).to(scale_dtype)
    if kind == FP8:
        codes = torch.randn(num_out, num_in).to(FP8_DTYPE)
        return QuantisedWeight(kind, codes, scales * 0.1, None, group)
    largest = 15 if kind == INT4 else 255
    codes = torch.randint(0, largest + 1, (num_out, num_in), dtype=torch.uint8)
    zeros = torch.randint(0, largest + 1, (num_out, num_groups), dtype=torch.uint8) if has_zeros else None
    return QuantisedWeight(kind, codes, scales * (0.2 / largest), zeros, group)
