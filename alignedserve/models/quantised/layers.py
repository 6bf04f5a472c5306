"""Reads the tensors of a quantised layer by their layout, and returns the form that the operations take."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

import torch

from alignedserve.models.quantised import awq, gptq, mxfp4, packed, plain
from alignedserve.models.quantised.config import QuantisedConfig
from alignedserve.models.quantised.layout import StoredTensor, TensorLayout
from alignedserve.ops.quantise import FP8, FP8_DTYPE, MXFP4, QuantisedWeight

LAYOUTS: dict[str, TensorLayout] = {
    "awq": awq,
    "gptq": gptq,
    "inverse": plain.Inverse,
    "packed": packed,
    "plain": plain.Plain,
}


class StoredTensors(Protocol):
    """The stored tensors of a checkpoint. Each call counts the tensor as taken."""

    def stored_dtype(self, name: str, wanted: StoredTensor) -> torch.dtype | None:
        """Returns the tensor's dtype; None if an optional tensor is missing. Raises ValueError with its name if it is
        required and missing, or has another shape or dtype."""
        ...

    def take_stored(self, name: str, wanted: StoredTensor) -> torch.Tensor | None:
        """Returns a view of the file. Raises the errors of `stored_dtype`."""
        ...


def take_layer(
    config: QuantisedConfig, layer: str, shape: tuple[int, int], of: StoredTensors
) -> QuantisedWeight:
    """Reads a layer [out, in]. Raises ValueError with its name if the checkpoint does not match."""
    layout, wanted = _layout(config), _tensors(config, layer, shape)
    found = {name: of.take_stored(f"{layer}.{name}", stored) for name, stored in wanted.items()}
    tensors = {name: tensor for name, tensor in found.items() if tensor is not None}
    try:
        weight = layout.weight(config, tensors, shape)
        _check_finite(weight)
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from None
    return weight


def check_layer(
    config: QuantisedConfig, layer: str, shape: tuple[int, int], of: StoredTensors | None
) -> QuantisedWeight:
    """Returns a layer of this form that takes one value's memory, and reads nothing.

    Raises the errors of `take_layer` about names, shapes and dtypes. If `of` is None, nothing is compared.
    """
    wanted = _tensors(config, layer, shape)
    dtypes = {name: of and of.stored_dtype(f"{layer}.{name}", stored) for name, stored in wanted.items()}
    group = config.group or shape[1]
    of_groups = (shape[0], -(-shape[1] // group))
    is_narrow = torch.bfloat16 in dtypes.values()
    return QuantisedWeight(
        config.kind,
        torch.empty(1, dtype=FP8_DTYPE if config.kind == FP8 else torch.uint8).expand(shape),
        torch.empty(1, dtype=torch.bfloat16 if is_narrow else torch.float32).expand(of_groups),
        torch.empty(1, dtype=torch.uint8).expand(of_groups) if config.has_zeros else None,
        group,
    )


def take_expert(
    layer: str, shape: tuple[int, int, int], of: StoredTensors
) -> Callable[[int], QuantisedWeight]:
    """Returns a function that reads one expert's weight of a layer [expert, out, in]. Both raise the errors of
    `take_layer`."""
    blocks, scales = (of.take_stored(layer + name, stored) for name, stored in _of_experts(layer, shape))
    assert blocks is not None and scales is not None

    def take(number: int) -> QuantisedWeight:
        weight = mxfp4.weight(blocks[number], scales[number])
        try:
            _check_finite(weight)
        except ValueError as error:
            raise ValueError(f"{layer} of expert {number}: {error}") from None
        return weight

    return take


def check_expert(layer: str, shape: tuple[int, int, int], of: StoredTensors) -> QuantisedWeight:
    """Returns the form of each expert's weight: see `check_layer`."""
    for name, stored in _of_experts(layer, shape):
        of.stored_dtype(layer + name, stored)
    _, num_out, num_in = shape
    return QuantisedWeight(
        MXFP4,
        torch.empty(1, dtype=torch.uint8).expand(num_out, num_in),
        torch.empty(1, dtype=torch.bfloat16).expand(num_out, num_in // mxfp4.GROUP),
        None,
        mxfp4.GROUP,
    )


def _of_experts(layer: str, shape: tuple[int, int, int]) -> Iterable[tuple[str, StoredTensor]]:
    try:
        return mxfp4.tensors(shape).items()
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from None


def _layout(config: QuantisedConfig) -> TensorLayout:
    if config.layout not in LAYOUTS:
        raise ValueError(f"layout={config.layout!r}: known are {', '.join(sorted(LAYOUTS))}")
    return LAYOUTS[config.layout]


def _tensors(config: QuantisedConfig, layer: str, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
    try:
        return _layout(config).tensors(config, shape)
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from None


def _check_finite(weight: QuantisedWeight) -> None:
    if not weight.scales.isfinite().all():
        raise ValueError("its scales are not finite")
    if weight.kind == FP8 and (weight.codes.view(torch.uint8) & 0x7F == 0x7F).any():
        raise ValueError("its weight has NaN")
