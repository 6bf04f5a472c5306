"""GPTQ. Words of codes lie along the inputs, [words, out], and words of zeros along the outputs, [groups, words]."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from alignedserve.models.quantised.config import QuantisedConfig
from alignedserve.models.quantised.layout import (
    FLOATS,
    StoredTensor,
    as_scales,
    num_groups,
    num_words,
    unpacked,
)
from alignedserve.ops.quantise import BITS, ZEROS, QuantisedWeight


def tensors(config: QuantisedConfig, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
    num_out, num_in = shape
    bits, groups = BITS[config.kind], num_groups(config, shape)
    return {
        "qweight": StoredTensor(((num_words(num_in, bits, "inputs"), num_out),), ("I32",)),
        "qzeros": StoredTensor(((groups, num_words(num_out, bits, "outputs")),), ("I32",)),
        "scales": StoredTensor(((groups, num_out),), FLOATS),
        "g_idx": StoredTensor(((num_in,),), ("I32",), is_optional=True),
    }


def weight(
    config: QuantisedConfig, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
) -> QuantisedWeight:
    bits, group = BITS[config.kind], config.group or shape[1]
    order = tensors.get("g_idx")
    if order is not None and not torch.equal(order.long(), torch.arange(shape[1]) // group):
        raise ValueError("g_idx reorders the inputs, which is not supported with groups")
    codes = unpacked(tensors["qweight"].T, bits)
    # The first version of the format stores zeros minus one, and 0 wraps around.
    stored = unpacked(tensors["qzeros"], bits).T.contiguous()
    zeros = stored + config.zero_offset & (1 << bits) - 1
    if not config.has_zeros:
        wanted = ZEROS[config.kind]
        if not (zeros == wanted).all():
            other = int(zeros[zeros != wanted][0])
            raise ValueError(f"a zero is {other}; must be {wanted}, since sym is true")
    return QuantisedWeight(
        config.kind, codes, as_scales(tensors["scales"].T), zeros if config.has_zeros else None, group
    )
