"""What an instance's process knows about the other ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from alignedserve.ops.shard import Shard


@dataclass(frozen=True)
class RankGroup:
    shard: Shard
    # The file in which they find each other: see torch_ranks.py.
    store_file: Path
    # The memory in which they exchange rows on a CPU: see kernels/cpu/ranks.py.
    shared: torch.Tensor
    slot_values: int
    # Per rank, on a CPU.
    num_threads: int
