"""How a layer's codes, scales and zeros lie in a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from alignedserve.models.config import QuantisedConfig
from alignedserve.ops.quantise import QuantisedWeight

# Safetensors' names.
FLOATS = ("F32", "F16", "BF16")
WORD_BITS = 32


@dataclass(frozen=True)
class Stored:
    """A tensor that a checkpoint has of a layer, by one of these shapes and dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False


class Layout(Protocol):
    def tensors(self, config: QuantisedConfig, shape: tuple[int, int]) -> Mapping[str, Stored]:
        """What a layer [out, in] has, by what follows its name. Raises ValueError for a layer that can't be so."""
        ...

    def weight(
        self, config: QuantisedConfig, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
    ) -> QuantisedWeight:
        """Makes a layer of these tensors, and does not write to them. Raises ValueError where they contradict
        `config`."""
        ...


def num_groups(config: QuantisedConfig, shape: tuple[int, int]) -> int:
    """Raises ValueError where groups do not divide the inputs."""
    if config.group is None:
        return 1
    if shape[1] % config.group:
        raise ValueError(f"its {shape[1]} inputs are not whole groups of {config.group}")
    return shape[1] // config.group


def num_words(count: int, bits: int, what: str) -> int:
    """How many words hold so many codes. Raises ValueError unless they fill them."""
    per_word = WORD_BITS // bits
    if count % per_word:
        raise ValueError(f"its {count} {what} do not fill words of {per_word} codes")
    return count // per_word


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """[rows, words] int32 to [rows, codes] uint8, the lowest bits first. (Files and processors are little-endian.)"""
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def as_scales(stored: torch.Tensor) -> torch.Tensor:
    """bfloat16 as it is, others in float32; contiguous, and a copy where it was not."""
    return (stored if stored.dtype is torch.bfloat16 else stored.float()).contiguous()
