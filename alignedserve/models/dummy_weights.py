"""Random weights in a model's real shapes, for measurements without a download."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

STANDARD_DEVIATION = 0.02
# Drawing eight billion normal numbers takes minutes, so all tensors repeat one block of a million. Its length is prime:
# with a multiple of a row's length, rows would be equal, and so would the logits of tokens.
BLOCK_LENGTH = 1_048_573


class DummySource:
    """A WeightSource. A tensor depends on `seed` and its name alone, not on the order of calls.

    The seed decides the block's numbers, and the name decides where a tensor begins in it.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._seed = seed
        # Made on the CPU in float32 for every target, so that all devices get the same numbers.
        generator = torch.Generator().manual_seed(self._number_of("block"))
        block = torch.randn(BLOCK_LENGTH, generator=generator, dtype=torch.float32) * STANDARD_DEVIATION
        self._block = block.to(dtype).to(self._device)

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, dtype=self._dtype, device=self._device)
        if name.endswith(("_bias", ".bias")):
            return torch.zeros(shape, dtype=self._dtype, device=self._device)
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._fill(tensor.view(-1), name)
        return tensor

    def linear(self, layer: str, num_out: int, num_in: int) -> torch.Tensor:
        return self.take(f"{layer}.weight", (num_out, num_in))

    def of_experts(
        self, layer: str, num_experts: int, num_out: int, num_in: int
    ) -> Callable[[int], torch.Tensor]:
        return lambda number: self.take(f"{layer}.{number}", (num_out, num_in))

    def finish(self) -> None:
        """Does nothing: there is nothing to close."""

    def _fill(self, flat: torch.Tensor, name: str) -> None:
        begin, done = self._number_of(f"tensor {name}") % BLOCK_LENGTH, 0
        while done < len(flat):
            piece = self._block[begin : begin + len(flat) - done]
            flat[done : done + len(piece)].copy_(piece)
            begin, done = 0, done + len(piece)

    def _number_of(self, text: str) -> int:
        """Returns a signed 64-bit number."""
        digest = hashlib.sha256(f"{self._seed}/{text}".encode()).digest()
        return int.from_bytes(digest[:8], "little", signed=True)
