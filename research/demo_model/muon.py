"""Muon (Keller Jordan): momentum with orthogonalized updates, for the weight matrices."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

# Newton-Schulz quintic that drives all singular values near 1 in five rounds.
A, B, C = 3.4445, -4.7750, 2.0315
NUM_ROUNDS = 5


def orthogonalize(stack: Tensor) -> Tensor:
    """Returns approximately the nearest (half-)orthogonal matrices to a stack of matrices."""
    tall = stack.shape[-2] > stack.shape[-1]
    x: Tensor = stack.bfloat16()
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NUM_ROUNDS):
        gram = x @ x.mT
        x = A * x + (B * gram + C * gram @ gram) @ x
    return (x.mT if tall else x).float()


class Muon:
    def __init__(
        self, parameters: Iterable[Tensor], momentum: float = 0.95, weight_decay: float = 0.02
    ) -> None:
        self._groups: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            self._groups.setdefault(parameter.shape, []).append(parameter)
        self._buffers = {shape: torch.zeros(len(group), *shape) for shape, group in self._groups.items()}
        self._momentum = momentum
        self._weight_decay = weight_decay

    @torch.no_grad()
    def step(self, lr: float) -> None:
        for shape, group in self._groups.items():
            gradient = torch.stack([parameter.grad for parameter in group if parameter.grad is not None])
            buffer = self._buffers[shape].lerp_(gradient, 1 - self._momentum)
            update = orthogonalize(gradient.lerp(buffer, self._momentum))
            scale = lr * max(1.0, shape[0] / shape[1]) ** 0.5
            for parameter, change in zip(group, update, strict=True):
                parameter.mul_(1 - lr * self._weight_decay).add_(change, alpha=-scale)
