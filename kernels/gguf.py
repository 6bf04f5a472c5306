"""A weight in the blocks of a GGUF file, as they are stored. The reference of the native kernels (`cpu/`) in plain torch.

Each row of a weight [out, in] is a sequence of blocks, and a block has the codes of `values` inputs with their scales.
The types differ in the bits of a code, in the inputs per scale, and in whether a group has a minimum besides its scale.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch


class BlockType(NamedTuple):
    # Inputs and bytes of a block.
    values: int
    num_bytes: int


TYPES = {
    "Q4_0": BlockType(32, 18),
    "Q4_1": BlockType(32, 20),
    "Q5_0": BlockType(32, 22),
    "Q5_1": BlockType(32, 24),
    "Q8_0": BlockType(32, 34),
    "Q2_K": BlockType(256, 84),
    "Q3_K": BlockType(256, 110),
    "Q4_K": BlockType(256, 144),
    "Q5_K": BlockType(256, 176),
    "Q6_K": BlockType(256, 210),
    "IQ4_NL": BlockType(32, 18),
    "IQ4_XS": BlockType(256, 136),
    "MXFP4": BlockType(32, 17),
}


@dataclass(frozen=True)
class GgufWeight:
    """A weight [out, in]. Raises ValueError if the bytes do not match the type."""

    # One of TYPES.
    type: str
    # [out, bytes of a row] uint8, possibly a view of a mapped file
    data: torch.Tensor

    def __post_init__(self) -> None:
        if self.data.shape[1] % TYPES[self.type].num_bytes:
            raise ValueError(
                f"rows of {self.data.shape[1]} bytes: must be whole blocks of {TYPES[self.type].num_bytes}"
            )

    @property
    def shape(self) -> torch.Size:
        block = TYPES[self.type]
        return torch.Size((len(self.data), self.data.shape[1] // block.num_bytes * block.values))

    def rows(self, first: int, end: int, step: int = 1) -> GgufWeight:
        """The weight of some of the outputs. Shares the memory."""
        return replace(self, data=self.data[first:end:step])

    def columns(self, first: int, end: int) -> GgufWeight:
        """The weight of some of the inputs, in whole blocks. Shares the memory."""
        block = TYPES[self.type]
        if first % block.values or end % block.values:
            raise ValueError(f"inputs {first} to {end}: must be whole blocks of {block.values}")
        return replace(
            self,
            data=self.data[
                :, first // block.values * block.num_bytes : end // block.values * block.num_bytes
            ],
        )

    def dequantised(self) -> torch.Tensor:
        """The values in float32."""
        raise NotImplementedError
