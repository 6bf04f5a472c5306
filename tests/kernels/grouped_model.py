"""The tiny model with layers in groups, whose blocks are given out and freed as an engine does it."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from alignedserve.kv.groups import LayerGroups, layer_groups, one_group
from alignedserve.kv.span import KvSpan
from alignedserve.ops.base import Ops
from alignedserve.ops.step import StepInputs
from tests.kernels.tiny_model import Chunk, LlamaLike, Shape, fill_step, new_cache

NO_BLOCK = -1


class GroupedModel:
    """What nobody has written, and what was freed, is NaN; so is what -1 as the number of a block leads to."""

    def __init__(
        self,
        ops: Ops,
        shape: Shape,
        block_size: int,
        max_seqs: int,
        max_len: int,
        groups: LayerGroups,
        kv_dtype: torch.dtype | None = None,
        seed: int = 0,
    ) -> None:
        self.block_size, self.groups = block_size, groups
        self.span = KvSpan(
            block_size,
            groups.window if groups.num_full else 0,
            num_full_groups=groups.num_full,
            num_sliding_groups=groups.num_sliding,
        )
        num_columns = -(-max_len // block_size)
        num_blocks = max_seqs * groups.num_groups * num_columns
        of_group = Shape(**{**vars(shape), "num_layers": groups.num_layers})
        self._memory = new_cache(of_group, 1 + num_blocks + 1, block_size, kv_dtype or ops.dtype)
        self._nothing = self._memory[0].clone()
        self._cache = self._memory[1:]
        # Block ids of each group of each sequence.
        self._blocks: list[list[list[int]]] = [
            [[] for _ in range(groups.num_groups)] for _ in range(max_seqs)
        ]
        self._free = list(range(num_blocks))
        self._random = random.Random(seed)
        self.step = StepInputs(max_seqs * max_len, max_seqs, num_columns, num_groups=groups.num_groups)
        self.model = LlamaLike(ops, shape).compile(self.step, self._cache, groups=groups)

    @property
    def num_freed(self) -> int:
        return sum(block == NO_BLOCK for seq in self._blocks for group in seq for block in group)

    def run(self, spans: Sequence[tuple[int, int, int]], ids: list[int], outputs: list[int]) -> torch.Tensor:
        """Computes (sequence, start, end) of `ids`. Returns hidden states of the last so many tokens of each."""
        chunks = []
        for seq, start, end in spans:
            blocks = self._grown(seq, start, end)
            chunks.append(Chunk(ids[start:end], start, blocks[0], other_groups=tuple(blocks[1:])))
        fill_step(self.step, chunks, self.block_size, outputs)
        return self.model.forward()[: sum(outputs)].clone()

    def _grown(self, seq: int, start: int, end: int) -> list[list[int]]:
        """Frees what the token at `start` has passed, and gives out what is needed up to `end`."""
        num_passed = self.span.num_passed(start)
        for group, blocks in enumerate(self._blocks[seq]):
            for column in range(len(blocks)):
                if blocks[column] != NO_BLOCK and group >= self.span.num_full_groups and column < num_passed:
                    self._cache[blocks[column]].view(torch.uint8).copy_(self._nothing.view(torch.uint8))
                    self._free.append(blocks[column])
                    blocks[column] = NO_BLOCK
            while len(blocks) < self.span.num_columns(end):
                blocks.append(self._free.pop(self._random.randrange(len(self._free))))
        return self._blocks[seq]


def grouped_and_whole(shape: Shape) -> tuple[LayerGroups, LayerGroups]:
    """The model's layers in groups, and in one, of which nothing is freed."""
    return layer_groups(shape.windows, shape.num_layers), one_group(shape.num_layers)
