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
    """Random codes, and scales of which some are so small that a float16 has no exponent for them. `num_in`: whole
    blocks."""
    generator = torch.Generator().manual_seed(seed)
    form = TYPES[name]
    num_blocks = num_in // form.values
    data = torch.randint(0, 256, (num_out, num_blocks, form.num_bytes), generator=generator).byte()
    if name == "MXFP4":
        data[:, :, 0] = torch.randint(118, 128, data.shape[:2], generator=generator).byte()
    else:
        for at in HALVES.get(name, (0,)):
            halves = torch.rand(data.shape[:2], generator=generator) * size
            halves *= torch.where(torch.rand(data.shape[:2], generator=generator) < 0.1, 2.0**-15, 1.0)
            data[:, :, at : at + 2] = halves.half().unsqueeze(2).view(torch.uint8)
    return GgufWeight(name, data.flatten(1))
