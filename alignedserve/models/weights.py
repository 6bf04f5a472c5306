"""Where a model's tensors come from. Models ask by name and shape; the source checks and delivers."""

from __future__ import annotations

from typing import Protocol

import torch


class WeightSource(Protocol):
    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor `name`, in the dtype and on the device the source was made for.

        Raises ValueError naming the tensor when it is missing or has another shape. The tensor may be a view of
        a mapped file: read it, or copy it, before the next `take`.
        """
        ...

    def finish(self) -> None:
        """Closes files. Raises ValueError when the checkpoint holds tensors that no one took."""
        ...
