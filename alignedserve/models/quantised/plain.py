"""One code in each element of `weight`: compressed-tensors' int-quantized and float-quantized, and other FP8 formats.

`weight_scale` holds one scale, or one for each output; `weight_scale_inv` one for each block. A value is always code *
scale.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from alignedserve.models.quantised.config import QuantisedConfig
from alignedserve.models.quantised.layout import FLOATS, StoredTensor, as_scales
from alignedserve.ops.quantise import FP8, QuantisedWeight, to_unsigned


class _Elements:
    def __init__(self, scale_name: str) -> None:
        self._scale_name = scale_name

    def tensors(self, config: QuantisedConfig, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        is_fp8, num_out = config.kind == FP8, shape[0]
        found = {
            "weight": StoredTensor((shape,), ("F8_E4M3",) if is_fp8 else ("I8",)),
            self._scale_name: StoredTensor(_scale_shapes(config, shape), FLOATS),
        }
        if config.has_zeros:
            found["weight_zero_point"] = StoredTensor(((num_out, _num_groups(config, shape)),), ("I8",))
        if config.has_input_scales:
            found["input_scale"] = StoredTensor(((1,), ()), FLOATS)
        return found

    def weight(
        self, config: QuantisedConfig, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
    ) -> QuantisedWeight:
        scales = tensors[self._scale_name]
        if config.num_outputs is None:
            scales = scales.reshape(1, 1).expand(shape[0], 1)
        elif config.num_outputs > 1:
            scales = scales.repeat_interleave(config.num_outputs, 0)[: shape[0]]
        codes = tensors["weight"] if config.kind == FP8 else to_unsigned(tensors["weight"])
        zeros = to_unsigned(tensors["weight_zero_point"]) if config.has_zeros else None
        return QuantisedWeight(config.kind, codes, as_scales(scales), zeros, config.group or shape[1])


Plain, Inverse = _Elements("weight_scale"), _Elements("weight_scale_inv")


def _num_groups(config: QuantisedConfig, shape: tuple[int, int]) -> int:
    # The last block may be smaller.
    return -(-shape[1] // (config.group or shape[1]))


def _scale_shapes(config: QuantisedConfig, shape: tuple[int, int]) -> tuple[tuple[int, ...], ...]:
    if config.num_outputs is None:
        return (1,), ()
    return ((-(-shape[0] // config.num_outputs), _num_groups(config, shape)),)
