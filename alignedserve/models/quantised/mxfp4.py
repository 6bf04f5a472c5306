"""MXFP4 as in gpt-oss. One pair of tensors holds a layer of all experts: `_blocks`, [expert, out, group, bytes], with
two codes in a byte, the lower half first; and `_scales`, [expert, out, group], which are powers of two (E8M0)."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from alignedserve.models.quantised.layout import StoredTensor
from alignedserve.ops.quantise import MXFP4, QuantisedWeight

GROUP, GROUP_BYTES = 32, 16
BLOCKS, SCALES = "_blocks", "_scales"


def tensors(shape: tuple[int, int, int]) -> Mapping[str, StoredTensor]:
    """Returns the tensors of such a layer [expert, out, in], by the suffix of their names. Raises ValueError if groups
    do not divide the inputs."""
    num_experts, num_out, num_in = shape
    if num_in % GROUP:
        raise ValueError(f"its {num_in} inputs are not whole groups of {GROUP}")
    groups = (num_experts, num_out, num_in // GROUP)
    return {
        BLOCKS: StoredTensor(((*groups, GROUP_BYTES),), ("U8",)),
        SCALES: StoredTensor((groups,), ("U8", "F8_E8M0")),
    }


def weight(blocks: torch.Tensor, scales: torch.Tensor) -> QuantisedWeight:
    """Makes one expert's weight."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1)
    # bfloat16 represents every power of two in E8M0.
    powers = scales.view(torch.float8_e8m0fnu).to(torch.bfloat16)
    return QuantisedWeight(MXFP4, codes, powers, None, GROUP)
