"""Adapters of a linear layer in plain torch. Each row is multiplied with all adapters, and only its own one counts."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from alignedserve.ops.adapters import LayerAdapters


@dataclass(frozen=True)
class TorchAdapters:
    # For each part that adapters add to: its first column, its a [adapters * rank, in], its b [adapters * rank, out].
    parts: tuple[tuple[int, torch.Tensor, torch.Tensor], ...]
    # For each row of an a: the number of the adapter, and its scale.
    numbers: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, adapters: LayerAdapters, dtype: torch.dtype, device: torch.device) -> TorchAdapters:
        parts = []
        for part, first in enumerate(adapters.first_columns):
            if adapters.has_part(part):
                a, b = adapters.stacked_a(part, dtype), adapters.stacked_b(part, dtype)
                parts.append((first, a.flatten(0, 1).to(device), b.flatten(0, 1).to(device)))
        numbers = torch.arange(1, adapters.num_adapters + 1, device=device)
        scales = torch.tensor(adapters.scales, dtype=dtype, device=device)
        rank = adapters.rank
        return cls(tuple(parts), numbers.repeat_interleave(rank), scales.repeat_interleave(rank))

    def put(self, number: int, one: TorchAdapters) -> None:
        """Puts one adapter in the place of adapter `number`."""
        rank = len(one.scales)
        rows = slice((number - 1) * rank, number * rank)
        for (_, a, b), (_, new_a, new_b) in zip(self.parts, one.parts, strict=True):
            a[rows], b[rows] = new_a, new_b
        self.scales[rows] = one.scales

    def add_to(self, out: torch.Tensor, x: torch.Tensor, numbers: torch.Tensor) -> None:
        """Adds to each row of `out` the result of its adapter for the row of `x`. `numbers`: the adapter of each
        row."""
        is_own = self.numbers == numbers.unsqueeze(1)
        for first, a, b in self.parts:
            # The result of another adapter may be infinite.
            shrunk = torch.where(is_own, x @ a.t() * self.scales, 0)
            out[:, first : first + b.shape[1]] += shrunk @ b
