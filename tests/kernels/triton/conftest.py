from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton import interpreter


@pytest.fixture(autouse=True, scope="module")
def quick_interpreter() -> Iterator[None]:
    with interpreter.quickened():
        yield


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    """Each run has other tensors; a test that fails shows the seed with which it fails again."""
    with torch.random.fork_rng():
        drawn = int(os.environ.get("TORCH_SEED") or torch.seed() % 2**31)
        torch.manual_seed(drawn)
        print(f"TORCH_SEED={drawn} brings these tensors again")
        yield
