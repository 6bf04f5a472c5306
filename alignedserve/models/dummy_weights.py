"""Random weights in a model's real shapes, for measuring without a download."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

STANDARD_DEVIATION = 0.02
# Eight billion normal numbers take minutes, so a tensor repeats a block of a million. The length is prime: if it were
# a multiple of a row's length, rows would be equal, and so would the logits of tokens.
BLOCK_LENGTH = 1_048_573


class DummySource:
    """A WeightSource. A tensor depends on `seed` and its name alone, not on which were taken before."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int) -> None:
        self._dtype = dtype
        self._device = torch.device(device)
        self._seed = seed

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
        # It is made on the CPU in float32 whatever the target, so that every device gets the same numbers.
        block = (
            torch.randn(min(len(flat), BLOCK_LENGTH), generator=self._generator(name), dtype=torch.float32)
            * STANDARD_DEVIATION
        )
        block = block.to(flat.device, flat.dtype)
        for start in range(0, len(flat), BLOCK_LENGTH):
            piece = flat[start : start + BLOCK_LENGTH]
            piece.copy_(block[: len(piece)])

    def _generator(self, name: str) -> torch.Generator:
        digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
