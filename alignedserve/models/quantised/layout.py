"""The order of a layer's codes, scales and zeros in a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from alignedserve.models.quantised.config import QuantisedConfig
from alignedserve.ops.quantise import QuantisedWeight

# Names of dtypes in safetensors.
FLOATS = ("F32", "F16", "BF16")
WORD_BITS = 32


@dataclass(frozen=True)
class StoredTensor:
    """A stored tensor of a layer, with its possible shapes and dtypes."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    is_optional: bool = False


class TensorLayout(Protocol):
    def tensors(self, config: QuantisedConfig, shape: tuple[int, int]) -> Mapping[str, StoredTensor]:
        """Returns the tensors of a layer [out, in], by the suffix of their names. Raises ValueError if the layer can't
        be stored in this layout."""
        ...

    def weight(
        self, config: QuantisedConfig, tensors: Mapping[str, torch.Tensor], shape: tuple[int, int]
    ) -> QuantisedWeight:
        """Makes a layer of these tensors without writing to them. Raises ValueError if they contradict `config`."""
        ...


def num_groups(config: QuantisedConfig, shape: tuple[int, int]) -> int:
    """Returns the number of groups. Raises ValueError unless groups divide the inputs."""
    if config.group is None:
        return 1
    if shape[1] % config.group:
        raise ValueError(f"its {shape[1]} inputs are not whole groups of {config.group}")
    return shape[1] // config.group


def num_words(count: int, bits: int, what: str) -> int:
    """Returns the number of words for `count` codes. Raises ValueError unless the codes fill the words."""
    per_word = WORD_BITS // bits
    if count % per_word:
        raise ValueError(f"its {count} {what} do not fill words of {per_word} codes")
    return count // per_word


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpacks [rows, words] int32 to [rows, codes] uint8, the lowest bits first. Files and processors are
    little-endian."""
    codes = words.contiguous().view(torch.uint8)
    if bits == 8:
        return codes
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def as_scales(stored: torch.Tensor) -> torch.Tensor:
    """Returns bfloat16 unchanged and other dtypes as float32. The result is contiguous; it is copied only if it was
    not."""
    return (stored if stored.dtype is torch.bfloat16 else stored.float()).contiguous()
