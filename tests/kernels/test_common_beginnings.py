"""Keys that sequences have in common are read once for all of them; each says what it says alone, to the last bit."""

from __future__ import annotations

import random

import pytest
import torch

from alignedserve.kernels.kv_rows import FP8, INT8
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from tests.kernels.harness import DTYPES
from tests.kernels.tiny_model import Chunk, LlamaLike, Shape, fill_step, new_cache

MOST_TOKENS, MOST_SEQS = 700, 40
SHAPES = {
    "grouped": Shape(head_dim=24, rotary_dim=18, num_heads=6, num_kv_heads=2, max_position=1024),
    "one-head": Shape(num_heads=7, num_kv_heads=1, head_dim=64, qk_norm=True, max_position=1024),
    "each-its-own": Shape(num_heads=3, num_kv_heads=3, head_dim=80, max_position=1024),
    "windowed": Shape(sliding_window=100, max_position=1024),
    "some-windows": Shape(windows=(100, None), max_position=1024),
}


class Engine:
    def __init__(
        self, shape: Shape, dtype: torch.dtype, block_size: int, num_threads: int, kv_dtype: torch.dtype | None
    ) -> None:
        self.block_size = block_size
        blocks = -(-MOST_TOKENS // block_size)
        self.step = StepInputs(2 * MOST_TOKENS, MOST_SEQS, blocks)
        self.num_blocks = MOST_SEQS * blocks
        self.cache = new_cache(shape, self.num_blocks, block_size, kv_dtype or dtype, fill=0.0)
        self.model = LlamaLike(CpuOps(dtype, num_threads), shape).compile(self.step, self.cache)

    def run(self, *chunks: Chunk) -> torch.Tensor:
        fill_step(self.step, list(chunks), self.block_size)
        return self.model.forward().clone()


class Tree:
    """Sequences that begin alike, two by two or more, at random."""

    def __init__(self, engine: Engine, dice: random.Random, num_seqs: int) -> None:
        self._engine, self._dice = engine, dice
        free = list(range(engine.num_blocks))
        dice.shuffle(free)
        # The ids and blocks of each sequence, without the token that it decodes.
        self.known: list[tuple[list[int], list[int]]] = []
        for _ in range(num_seqs):
            ids, blocks = self._beginning()
            length = min(len(ids) + dice.randint(0, 200), MOST_TOKENS - 2)
            ids = ids + [dice.randrange(101) for _ in range(length - len(ids))]
            num_blocks = length // engine.block_size + 1
            blocks = blocks + [free.pop() for _ in range(num_blocks - len(blocks))]
            before = self._num_shared * engine.block_size
            if length > before:
                engine.run(Chunk(ids[before:], before, blocks))
            self.known.append((ids, blocks))

    def _beginning(self) -> tuple[list[int], list[int]]:
        self._num_shared = 0
        if not self.known or self._dice.random() < 0.2:
            return [], []
        ids, blocks = self._dice.choice(self.known)
        self._num_shared = self._dice.randint(0, len(ids) // self._engine.block_size)
        return ids[: self._num_shared * self._engine.block_size], blocks[: self._num_shared]

    def decodes(self) -> list[Chunk]:
        return [Chunk([self._dice.randrange(101)], len(ids), blocks) for ids, blocks in self.known]


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [None, FP8, INT8], ids=["plain", "fp8", "int8"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_begin_alike_say_what_they_say_alone(
    name: str, kv_dtype: torch.dtype | None, dtype: torch.dtype, seed: int
) -> None:
    dice = random.Random(f"{name} {kv_dtype} {dtype} {seed}")
    shape, block_size = SHAPES[name], dice.choice([8, 16, 24, 32, 128])
    engine = Engine(shape, dtype, block_size, dice.randint(1, 5), kv_dtype)
    tree = Tree(engine, dice, dice.randint(2, MOST_SEQS - 1))
    decodes = tree.decodes()
    alone = [engine.run(chunk) for chunk in decodes]
    found = engine.run(*decodes)
    assert torch.equal(found, torch.cat(alone))
    # and beside part of a prompt
    dice.shuffle(decodes)
    prompt = Chunk([dice.randrange(101) for _ in range(150)], 0, list(range(-(-151 // block_size))))
    unused = {block for chunk in decodes for block in chunk.blocks}
    prompt.blocks[:] = [block for block in range(engine.num_blocks) if block not in unused][: len(prompt.blocks)]
    decodes.insert(dice.randint(0, len(decodes)), prompt)
    alone = [engine.run(chunk) for chunk in decodes]
    assert torch.equal(engine.run(*decodes), torch.cat(alone))


@pytest.mark.parametrize("num_threads", [1, 2, 7])
def test_many_rows_of_one_beginning_are_cut_for_all_threads(num_threads: int) -> None:
    shape = SHAPES["one-head"]
    engine = Engine(shape, torch.bfloat16, 16, num_threads, None)
    dice = random.Random(0)
    ids = [dice.randrange(101) for _ in range(320)]
    shared = list(range(20))
    engine.run(Chunk(ids, 0, shared))
    decodes = [Chunk([dice.randrange(101)], 320, [*shared, 20 + number]) for number in range(MOST_SEQS)]
    alone = [engine.run(chunk) for chunk in decodes]
    assert torch.equal(engine.run(*decodes), torch.cat(alone))


def test_a_sequence_that_fills_its_blocks_from_the_end_shares_with_none() -> None:
    """Its keys lie elsewhere in the same blocks."""
    shape = SHAPES["grouped"]
    engine = Engine(shape, torch.float32, 16, 1, None)
    dice = random.Random(0)
    ids = [dice.randrange(101) for _ in range(200)]
    blocks = list(range(13))
    engine.run(Chunk(ids, 0, blocks))
    plain = Chunk([5], 200, blocks)
    reversed_ = Chunk([5], 200, [*blocks[:12], 13], is_reversed=True)
    alone = [engine.run(plain), engine.run(reversed_)]
    assert not torch.equal(*alone)
    assert torch.equal(engine.run(plain, reversed_), torch.cat(alone))
