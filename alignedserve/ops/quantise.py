"""The parts of a linear layer, as float tensors or in codes, and their conversion to codes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from alignedserve.kernels.cpu.groups import TILE_COLUMNS
from alignedserve.kernels.gguf import GgufWeight
from alignedserve.kernels.int4 import quantise_int4
from alignedserve.kernels.quantised import (
    BITS,
    FP8,
    FP8_DTYPE,
    INT4,
    INT8,
    MXFP4,
    ZEROS,
    QuantisedWeight,
    quantise_fp8,
    quantise_int8,
    to_unsigned,
)

__all__ = [
    "BITS",
    "FP8",
    "FP8_DTYPE",
    "INT4",
    "INT8",
    "MXFP4",
    "QUANTISERS",
    "ZEROS",
    "GgufWeight",
    "Part",
    "QuantisedWeight",
    "block_runs",
    "form_of",
    "inputs_of",
    "outputs_of",
    "plain_parts",
    "quantised_parts",
    "to_unsigned",
    "without_blocks",
]

Part = torch.Tensor | QuantisedWeight | GgufWeight
# By the possible values of `quantization`.
QUANTISERS: dict[str, Callable[[torch.Tensor], QuantisedWeight]] = {
    INT8: quantise_int8,
    INT4: quantise_int4,
    FP8: quantise_fp8,
}


def quantised_parts(parts: Sequence[Part], scheme: str | None, dtype: torch.dtype) -> list[QuantisedWeight]:
    """Returns the parts in codes: those that have codes already, or float tensors in `dtype` quantised by `scheme`.

    Empty if there are none. Raises ValueError for a mixture.
    """
    plain = plain_parts(parts)
    coded = [part for part in parts if isinstance(part, QuantisedWeight)]
    if plain and coded:
        raise ValueError(f"{len(coded)} parts of a layer are quantized, {len(plain)} are not")
    return [QUANTISERS[scheme](part.to(dtype)) for part in plain] if plain and scheme else coded


def outputs_of(part: Part, some: slice) -> Part:
    """The part with these outputs only. Shares the memory."""
    return part[some] if isinstance(part, torch.Tensor) else part.rows(some.start, some.stop, some.step or 1)


def inputs_of(part: Part, some: slice) -> Part:
    """The part with these inputs only. Shares the memory. Raises ValueError if they cut through a group."""
    return part[:, some] if isinstance(part, torch.Tensor) else part.columns(some.start, some.stop)


def form_of(part: Part) -> str:
    """Describes a part's form. Parts of the same shape can be stored alike if their forms are equal."""
    if isinstance(part, torch.Tensor):
        return "floats"
    if isinstance(part, GgufWeight):
        return part.type
    zeros = "" if part.zeros is None else ", with zeros"
    return f"{part.kind} (scales of an output: {part.num_groups}, {part.scales.dtype}{zeros})"


def without_blocks(parts: Sequence[Part], dtype: torch.dtype) -> list[torch.Tensor | QuantisedWeight]:
    """Returns the parts with those in types of GGUF as floats in `dtype`, or as MXFP4 if all are in that. Raises
    ValueError if a value is not finite."""
    found: list[torch.Tensor | QuantisedWeight] = []
    is_mxfp4 = all(isinstance(part, GgufWeight) and part.is_mxfp4 for part in parts)
    for part in parts:
        if not isinstance(part, GgufWeight):
            found.append(part)
            continue
        made = part.as_mxfp4() if is_mxfp4 else part.dequantised(dtype)
        if not (made if isinstance(made, torch.Tensor) else made.scales).isfinite().all():
            raise ValueError(f"a scale of a weight in {part.type} is not finite")
        found.append(made)
    return found


def block_runs(parts: Sequence[Part], is_gated: bool, dtype: torch.dtype) -> list[list[Part]]:
    """Splits a layer with parts in types of GGUF into runs of one form each, which CPU kernels multiply as they are.
    Returns nothing if the layer has no such parts, or if they become floats: with float32 rows, and where outputs can't
    be split."""
    types = {part.type for part in parts if isinstance(part, GgufWeight)}
    if not types or dtype is not torch.bfloat16:
        return []
    runs = [[*run] for _, run in groupby(parts, form_of)]
    if len(runs) == 1:
        return [] if types == {"MXFP4"} else runs
    has_whole_tiles = not any(sum(part.shape[0] for part in run) % TILE_COLUMNS for run in runs[:-1])
    return runs if has_whole_tiles and not is_gated else []


def plain_parts(parts: Sequence[Part]) -> list[torch.Tensor]:
    return [part for part in parts if isinstance(part, torch.Tensor)]
