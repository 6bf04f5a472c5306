"""Keys that decoding sequences share are read once for all of them, and each result matches the sequence's alone."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence

import pytest
import torch

from alignedserve.kernels.cpu.library import library
from alignedserve.kernels.kv_rows import FP8, INT8
from alignedserve.ops.cpu_model import CpuModel
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from tests.kernels.grouped_model import GroupedModel, grouped_and_whole
from tests.kernels.harness import DTYPES
from tests.kernels.test_attention import Runner
from tests.kernels.tiny_model import Chunk, LlamaLike, Shape, fill_step, new_cache

MOST_TOKENS, MOST_SEQS = 700, 40
SHAPES = {
    "grouped": Shape(head_dim=24, rotary_dim=18, num_heads=6, num_kv_heads=2, max_position=1024),
    "one-head": Shape(num_heads=7, num_kv_heads=1, head_dim=64, qk_norm=True, max_position=1024),
    "each-its-own": Shape(num_heads=3, num_kv_heads=3, head_dim=80, max_position=1024),
    "windowed": Shape(sliding_window=100, max_position=1024),
    "wide-window": Shape(sliding_window=900, max_position=1024),
    "some-windows": Shape(windows=(100, None), max_position=1024),
}


class Engine:
    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        block_size: int,
        num_threads: int,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.shape, self.block_size = shape, block_size
        blocks = -(-MOST_TOKENS // block_size)
        self.step = StepInputs(2 * MOST_TOKENS, MOST_SEQS, blocks)
        self.num_blocks = MOST_SEQS * blocks
        self.cache = new_cache(shape, self.num_blocks, block_size, kv_dtype or dtype, fill=0.0)
        model = LlamaLike(CpuOps(dtype, num_threads), shape).compile(self.step, self.cache)
        assert isinstance(model, CpuModel)
        self.model = model

    def run(self, *chunks: Chunk, outputs: list[int] | None = None) -> torch.Tensor:
        fill_step(self.step, list(chunks), self.block_size, outputs)
        return self.model.forward().clone()

    def check(self, chunks: Sequence[Chunk], outputs: list[int] | None = None) -> None:
        """Compares what all yield together, and the cache after it, with what they yield one by one. Together first:
        one by one, each writes the same keys again."""
        before = self.cache.clone()
        together, cache = self.run(*chunks, outputs=outputs), self.cache.clone()
        self.cache.copy_(before)
        wanted = outputs or [len(chunk.ids) for chunk in chunks]
        alone = [self.run(chunk, outputs=[count]) for chunk, count in zip(chunks, wanted, strict=True)]
        assert torch.equal(together, torch.cat(alone))
        assert torch.equal(cache.view(torch.uint8), self.cache.view(torch.uint8))

    def keys_read(self) -> tuple[int, int]:
        """Returns the keys of all KV heads that attention reads in the last step, and the number of tasks."""
        num_tasks = ctypes.c_int64()
        shape = self.shape
        found = library().keys_read(
            ctypes.addressof(self.model._struct),
            *(shape.num_heads, shape.num_kv_heads, self.block_size),
            ctypes.byref(num_tasks),
        )
        return found, num_tasks.value


class Tree:
    """Sequences that begin like earlier ones, at random."""

    def __init__(self, engine: Engine, dice: random.Random, num_seqs: int) -> None:
        self._engine, self._dice = engine, dice
        self.free = list(range(engine.num_blocks))
        dice.shuffle(self.free)
        # The ids and blocks of each sequence, without the token that it decodes.
        self.known: list[tuple[list[int], list[int]]] = []
        for _ in range(num_seqs):
            self._add(*self._beginning())

    def _add(self, ids: list[int], blocks: list[int]) -> None:
        engine, before = self._engine, len(ids)
        length = min(before + self._dice.randint(0, 200), MOST_TOKENS - 2)
        ids = ids + [self._dice.randrange(101) for _ in range(length - before)]
        num_blocks = length // engine.block_size + 1
        blocks = blocks + [self.free.pop() for _ in range(num_blocks - len(blocks))]
        if length > before:
            engine.run(Chunk(ids[before:], before, blocks))
        self.known.append((ids, blocks))

    def _beginning(self) -> tuple[list[int], list[int]]:
        if not self.known or self._dice.random() < 0.2:
            return [], []
        ids, blocks = self._dice.choice(self.known)
        num_shared = self._dice.randint(0, len(ids) // self._engine.block_size)
        return ids[: num_shared * self._engine.block_size], blocks[:num_shared]

    def decodes(self) -> list[Chunk]:
        return [Chunk([self._dice.randrange(101)], len(ids), blocks) for ids, blocks in self.known]


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", [None, FP8, INT8], ids=["plain", "fp8", "int8"])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("seed", range(3))
def test_rows_that_begin_alike_match_their_results_alone(
    name: str, kv_dtype: torch.dtype | None, dtype: torch.dtype, seed: int
) -> None:
    dice = random.Random(f"{name} {kv_dtype} {dtype} {seed}")
    block_size = dice.choice([8, 16, 24, 32, 128])
    engine = Engine(SHAPES[name], dtype, block_size, dice.randint(1, 5), kv_dtype)
    tree = Tree(engine, dice, dice.randint(2, MOST_SEQS - 1))
    decodes = tree.decodes()
    engine.check(decodes)
    # beside a part of a prompt, and with results of some of them only
    dice.shuffle(decodes)
    blocks = [tree.free.pop() for _ in range(-(-150 // block_size))]
    decodes.insert(dice.randint(0, len(decodes)), Chunk([dice.randrange(101) for _ in range(150)], 0, blocks))
    engine.check(decodes)
    engine.check(decodes, [dice.randint(0, 1) for _ in decodes])


def behind(common: int, num_seqs: int, own: int = 0) -> list[Chunk]:
    """Decodes of sequences with so many blocks of 16 in common, and so many of their own, the last one not full."""
    blocks = list(range(common))
    free = iter(range(common, 10_000))
    return [
        Chunk([number], 16 * (common + own), blocks + [next(free) for _ in range(own + 1)])
        for number in range(num_seqs)
    ]


@pytest.mark.parametrize("num_threads", [1, 2, 7])
@pytest.mark.parametrize("name", ["grouped", "one-head"])
@pytest.mark.parametrize("own", [0, 20])
def test_what_is_common_is_read_once_for_each_part_of_the_rows(name: str, num_threads: int, own: int) -> None:
    engine = Engine(SHAPES[name], torch.float32, 16, num_threads)
    decodes = behind(20, MOST_SEQS, own)
    engine.run(*decodes)
    num_keys, num_tasks = engine.keys_read()
    heads = SHAPES[name].num_kv_heads
    apart, common = MOST_SEQS * heads * (16 * own + 1), heads * 320
    # Parts of at most 240 rows, and a few for each thread
    least = -(-MOST_SEQS * SHAPES[name].num_heads // heads // 240)
    assert apart + least * common <= num_keys <= apart + 4 * num_threads * common
    assert num_threads > 1 or own or num_keys == apart + least * common
    # At most one thread has nothing to do.
    assert num_tasks >= num_threads - 1
    engine.check(decodes)


def test_little_in_common_leaves_as_many_tasks_as_nothing_in_common() -> None:
    """A task with all rows would keep one thread busy while others wait."""
    shape = SHAPES["one-head"]
    engine = Engine(shape, torch.float32, 16, 4)
    decodes = behind(4, 32, 30)
    engine.run(*decodes)
    num_keys, num_tasks = engine.keys_read()
    assert num_tasks >= 8 and num_keys < 32 * (34 * 16 + 1)


def test_nothing_in_common_is_read_for_each_row() -> None:
    engine = Engine(SHAPES["grouped"], torch.float32, 16, 2)
    # Fewer tokens than a tile in common
    for common in (0, 3):
        engine.run(*behind(common, 9, 5))
        assert engine.keys_read()[0] == 2 * 9 * (16 * (common + 5) + 1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_count_once_for_each_row(dtype: torch.dtype) -> None:
    shape = Shape(num_layers=1, sinks=True, num_heads=6, num_kv_heads=2)
    runner = Runner(CpuOps(dtype, 2), shape, 16)
    ids = [number % 101 for number in range(140)]
    common = list(range(8))
    decodes = []
    for number in range(5):
        blocks = [*common, 10 + number]
        runner.run(Chunk(ids[: 130 + number], 0, blocks))
        decodes.append(Chunk([number], 130 + number, blocks))
    together = runner.run(*decodes)
    assert torch.equal(together, torch.cat([runner.run(chunk) for chunk in decodes]))


def test_layers_of_each_group_share_by_their_own_blocks() -> None:
    """The second group's keys differ, although those of the first are in the same blocks."""
    shape = Shape(num_layers=3, windows=(None, None, 64))
    groups, _ = grouped_and_whole(shape)
    assert groups.num_full == 2
    model = GroupedModel(CpuOps(torch.float32, 1), shape, 16, 2, 210, groups)
    ids = [number % 101 for number in range(201)]
    for seq in (0, 1):
        model.run([(seq, 0, 200)], ids, [0])
    first, second = model._blocks
    second[0][:12] = first[0][:12]
    for block in second[1]:
        model._cache[block] *= 2
    spans = [(0, 200, 201), (1, 200, 201)]
    together = model.run(spans, ids, [1, 1])
    alone = [model.run([span], ids, [1]) for span in spans]
    assert not torch.equal(*alone)
    assert torch.equal(together, torch.cat(alone))


def test_a_sequence_that_fills_its_blocks_from_the_end_shares_with_none() -> None:
    """Its keys lie elsewhere in the same blocks."""
    engine = Engine(SHAPES["grouped"], torch.float32, 16, 1)
    engine.run(*(Chunk([number % 101 for number in range(200)], 0, list(range(13))),))
    chunks = [
        Chunk([5], 200, list(range(13))),
        Chunk([5], 200, [*range(12), 13], is_reversed=True),
        Chunk([6], 200, [*range(12), 14], is_reversed=True),
    ]
    engine.check(chunks)
    engine.run(*chunks)
    assert engine.keys_read()[0] == 3 * 2 * 201
