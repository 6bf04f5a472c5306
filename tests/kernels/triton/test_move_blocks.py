from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.triton.move_blocks import (
    PIECE,
    gather_blocks,
    gather_blocks_reference,
    scatter_blocks,
    scatter_blocks_reference,
)
from tests.kernels.triton.harness import DEVICE, DTYPES, poison, randn

# elements of 2 or 4 bytes; the last one is a few pieces and a tail
SHAPES = [(8,), (2, 2, 3, 16), (2 * PIECE + 8,)]


def same_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("id_dtype", [torch.int32, torch.int64])
def test_gather_and_scatter_back(dtype: torch.dtype, shape: tuple[int, ...], id_dtype: torch.dtype) -> None:
    store = randn(9, *shape, dtype=dtype)
    ids = torch.tensor([7, -1, 0, 8, 3], dtype=id_dtype, device=DEVICE)
    buffer, expected = (poison(5, *shape, dtype=dtype) for _ in range(2))
    gather_blocks(store, ids, buffer)
    gather_blocks_reference(store, ids, expected)
    assert same_bytes(buffer, expected) and buffer[1].isnan().all()

    target, expected = (poison(9, *shape, dtype=dtype) for _ in range(2))
    scatter_blocks(buffer, ids, target)
    scatter_blocks_reference(buffer, ids, expected)
    assert same_bytes(target, expected) and same_bytes(target[[7, 0, 8, 3]], store[[7, 0, 8, 3]])


def test_blocks_may_lie_apart() -> None:
    wide = randn(6, 3, 8)
    buffer = poison(2, 2, 8)
    gather_blocks(wide[:, :2], torch.tensor([5, 2], device=DEVICE), buffer)
    assert torch.equal(buffer, wide[[5, 2], :2])


def test_nothing_to_move() -> None:
    gather_blocks(randn(3, 8), torch.empty(0, dtype=torch.int64, device=DEVICE), poison(0, 8))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("store", dict(store=torch.zeros(4, 8, 2).transpose(1, 2))),
        ("store", dict(store=torch.zeros(4, 6))),
        ("store", dict(store=torch.zeros(4, 9)[:, :8])),
        ("store", dict(store=torch.zeros(33)[1:].view(4, 8))),
        ("ids", dict(ids=torch.zeros(2))),
        ("buffer", dict(buffer=torch.zeros(3, 8))),
        ("buffer", dict(buffer=torch.zeros(2, 8).half())),
    ],
)
def test_wrong_arguments_are_named(name: str, change: dict[str, Any]) -> None:
    arguments: dict[str, Any] = dict(
        store=torch.zeros(4, 8), ids=torch.zeros(2, dtype=torch.int64), buffer=torch.zeros(2, 8)
    )
    for move in (gather_blocks, scatter_blocks):
        with pytest.raises(ValueError, match=f"^{name} must"):
            move(**{**arguments, **change})
