"""compressed-tensors' pack-quantized. Words of codes lie along the inputs, and words of zeros along the outputs."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from alignedserve.models.quantised.config import QuantisedConfig
from alignedserve.models.quantised.layout import (
    FLOATS,
    WORD_BITS,
    StoredTensor,
    as_scales,
    num_groups,
    unpacked,
)
from alignedserve.ops.quantise import BITS, QuantisedWeight


def tensors(config: QuantisedConfig, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
    num_out, num_in = shape
    groups, per_word = num_groups(config, shape), WORD_BITS // BITS[config.kind]
    of_groups = (num_out, groups)
    # One scale for the whole layer is stored as one entry.
    scales = (of_groups,) if config.num_outputs else ((1,), ())
    found = {
        "weight_packed": StoredTensor(((num_out, -(-num_in // per_word)),), ("I32",)),
        "weight_scale": StoredTensor(scales, FLOATS),
        "weight_shape": StoredTensor(((2,),), ("I64", "I32")),
        # The order of inputs, if they are reordered.
        "weight_g_idx": StoredTensor(((num_in,),), ("I32",), is_optional=True),
    }
    if config.has_zeros:
        words = (-(-num_out // per_word), groups)
        found["weight_zero_point"] = StoredTensor((words,), ("I32",))
    return found


def weight(
    config: QuantisedConfig, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
) -> QuantisedWeight:
    said, bits, group = tuple(tensors["weight_shape"].tolist()), BITS[config.kind], config.group or shape[1]
    if said != shape:
        raise ValueError(f"weight_shape is {said}; must be {shape}")
    codes = unpacked(tensors["weight_packed"], bits)[:, : shape[1]].contiguous()
    order = tensors.get("weight_g_idx")
    if order is not None and not torch.equal(order.long(), torch.arange(shape[1]) // group):
        raise ValueError("weight_g_idx reorders the inputs, which is not supported")
    zeros = None
    if config.has_zeros:
        zeros = unpacked(tensors["weight_zero_point"].T, bits)[:, : shape[0]].T.contiguous()
    scales = tensors["weight_scale"] if config.num_outputs else tensors["weight_scale"].reshape(1, 1)
    return QuantisedWeight(config.kind, codes, as_scales(scales.expand(shape[0], -1)), zeros, group)
