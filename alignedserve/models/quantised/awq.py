"""AWQ's gemm version. Words of codes lie along the outputs, [in, words], and so do words of zeros, [groups, words]. The
codes in a word are permuted."""

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
from alignedserve.ops.quantise import BITS, QuantisedWeight

# The place in a word of each of eight outputs. From the lowest bits up, a word has outputs 0, 2, 4, 6, 1, 3, 5, 7.
PLACES = [0, 4, 1, 5, 2, 6, 3, 7]


def tensors(config: QuantisedConfig, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
    num_out, num_in = shape
    groups, words = num_groups(config, shape), num_words(num_out, BITS[config.kind], "outputs")
    return {
        "qweight": StoredTensor(((num_in, words),), ("I32",)),
        "qzeros": StoredTensor(((groups, words),), ("I32",)),
        "scales": StoredTensor(((groups, num_out),), FLOATS),
    }


def weight(
    config: QuantisedConfig, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
) -> QuantisedWeight:
    codes, zeros = _in_order(tensors["qweight"]), _in_order(tensors["qzeros"])
    return QuantisedWeight(
        config.kind, codes, as_scales(tensors["scales"].T), zeros, config.group or shape[1]
    )


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Unpacks [rows, words] to [outputs, rows]."""
    codes = unpacked(words, 4)
    return codes.view(len(codes), -1, 8)[:, :, PLACES].flatten(1).T.contiguous()
