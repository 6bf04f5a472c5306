"""Random weights in the types of GGUF files."""

from __future__ import annotations

import torch

from alignedserve.kernels.gguf import TYPES, GgufWeight

# The places of a block's float16 numbers.
HALVES = {
    "Q4_1": (0, 2),
    "Q5_1": (0, 2),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def gguf_weight(name: str, num_out: int, num_in: int, seed: int = 0, size: float = 1.0) -> GgufWeight:
    """Random codes, and scales of which some are so small that a float16 has no exponent for them. Values are about as
    often above 0 as below. `num_in`: whole blocks."""
    generator = torch.Generator().manual_seed(seed)
    form = TYPES[name]
    data = torch.randint(0, 256, (num_out, num_in // form.values, form.num_bytes), generator=generator).byte()
    if name == "MXFP4":
        data[:, :, 0] = torch.randint(119, 123, data.shape[:2], generator=generator).byte()
        return GgufWeight(name, data.flatten(1))
    scales = torch.rand(data.shape[:2], generator=generator) * size
    scales *= torch.where(torch.rand(data.shape[:2], generator=generator) < 0.1, 2.0**-15, 1.0)
    scale_at, *minimum_at = HALVES.get(name, (0,))
    _put(data, scale_at, scales)
    for at in minimum_at:
        middle = ((1 << form.low_bits + form.high_bits) - 1) / 2
        # The file has it with this sign in blocks of 256.
        _put(data, at, scales * middle if form.values == 256 else scales * -middle)
    return GgufWeight(name, data.flatten(1))


def _put(data: torch.Tensor, at: int, values: torch.Tensor) -> None:
    data[:, :, at : at + 2] = values.half().unsqueeze(2).view(torch.uint8)
