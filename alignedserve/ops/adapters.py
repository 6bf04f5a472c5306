"""Adapters (LoRA) of a linear layer: what they add to its output, for rows of requests with an adapter.

To x @ weight.T + bias of a row with adapter i, (x @ a[i].T) @ b[i].T * scale[i] is added, before the activation. A
layer made of several in the checkpoint has an a and a b for each of these parts. Each part's b yields its part of the
output. Rows without an adapter stay the same, bit by bit.

Adapters are numbered from 1, in the order of their names; 0 stands for none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from alignedserve.ops.shard import RankPart


@dataclass(frozen=True)
class Delta:
    """What one adapter adds to the weight of one part of a layer: b @ a, times the adapter's scale."""

    # [rank, in]
    a: torch.Tensor
    # [out, rank]
    b: torch.Tensor


@dataclass(frozen=True)
class LayerAdapters:
    """What all adapters add to a layer."""

    in_features: int
    # The width of each part.
    out_features: tuple[int, ...]
    # [adapter][part]; None: the adapter adds nothing to this part.
    deltas: Sequence[Sequence[Delta | None]]
    # One per adapter.
    scales: Sequence[float]
    # Adapters are padded to this rank at least, so that others can take their places later.
    min_rank: int = 0

    @property
    def num_adapters(self) -> int:
        return len(self.deltas)

    @property
    def rank(self) -> int:
        """The largest rank. Adapters of a lower rank are padded with zeros."""
        ranks = (delta.a.shape[0] for parts in self.deltas for delta in parts if delta is not None)
        return max([self.min_rank, *ranks])

    def stacked_a(self, part: int, dtype: torch.dtype) -> torch.Tensor:
        """[adapters, rank, in]"""
        stacked = torch.zeros(self.num_adapters, self.rank, self.in_features, dtype=dtype)
        for number, delta in enumerate(each[part] for each in self.deltas):
            if delta is not None:
                stacked[number, : delta.a.shape[0]] = delta.a.to(dtype)
        return stacked

    def stacked_b(self, part: int, dtype: torch.dtype) -> torch.Tensor:
        """[adapters, rank, out], transposed, so that the values of one rank are contiguous."""
        stacked = torch.zeros(self.num_adapters, self.rank, self.out_features[part], dtype=dtype)
        for number, delta in enumerate(each[part] for each in self.deltas):
            if delta is not None:
                stacked[number, : delta.b.shape[1]] = delta.b.t().to(dtype)
        return stacked

    def split(self, out_features: Sequence[int]) -> LayerAdapters:
        """The adapters of a layer with one part, divided into several parts side by side."""

        def pieces(delta: Delta | None) -> list[Delta | None]:
            if delta is None:
                return [None] * len(out_features)
            return [Delta(delta.a, b) for b in torch.split(delta.b, list(out_features))]

        deltas = [pieces(delta) for (delta,) in self.deltas]
        return replace(self, out_features=tuple(out_features), deltas=deltas)

    def of_rank(self, part: RankPart) -> LayerAdapters:
        """The adapters of a rank's part. With a part of the inputs, layer and adapters yield parts of a sum."""
        mine = part.outputs or [slice(out) for out in self.out_features]
        of_a = part.inputs or slice(self.in_features)

        def part_of(delta: Delta | None, rows: slice) -> Delta | None:
            return delta and Delta(delta.a[:, of_a], delta.b[rows])

        deltas = [[part_of(*each) for each in zip(parts, mine, strict=True)] for parts in self.deltas]
        widths = tuple(len(range(out)[rows]) for out, rows in zip(self.out_features, mine, strict=True))
        in_features = len(range(self.in_features)[of_a])
        return replace(self, in_features=in_features, out_features=widths, deltas=deltas)

    @property
    def first_columns(self) -> list[int]:
        """The first output column of each part."""
        return [sum(self.out_features[:part]) for part in range(len(self.out_features))]

    def has_part(self, part: int) -> bool:
        """Whether any adapter adds to this part, or may do so later."""
        return self.min_rank > 0 or any(each[part] is not None for each in self.deltas)

    @property
    def num_values(self) -> int:
        """Values in the stacked tensors."""
        of_a = len(self.out_features) * self.in_features
        return self.num_adapters * self.rank * (of_a + sum(self.out_features))
