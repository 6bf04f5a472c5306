"""A token's hidden state, logits and KV are the same bits, however it is cut and whatever runs beside it."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from alignedserve.kernels.kv_rows import FP8, INT8, as_movable
from alignedserve.ops.base import Ops
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from tests.kernels.harness import DTYPES
from tests.kernels.tiny_model import Chunk, LlamaLike, Shape, fill_step, new_cache

LENGTH = 170
IDS = torch.randint(0, 101, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()
SHAPES = {
    "grouped": Shape(head_dim=24, rotary_dim=18, num_heads=6, num_kv_heads=2, hidden=80, intermediate=72),
    "windowed": Shape(sliding_window=50, qk_norm=True, num_heads=3, num_kv_heads=3),
    "post-normed": Shape(post_norms=True, hidden=72, intermediate=40, head_dim=40),
    "experts": Shape(num_experts=7, top_k=3, hidden=72, intermediate=40),
    "adapters": Shape(num_adapters=2, num_heads=3, num_kv_heads=1, head_dim=24, hidden=72, intermediate=40),
}


class Engine:
    def __init__(
        self,
        shape: Shape,
        dtype: torch.dtype,
        block_size: int,
        num_threads: int,
        kv_dtype: torch.dtype | None = None,
        ops: Ops | None = None,
    ) -> None:
        self.block_size = block_size
        self.num_adapters = shape.num_adapters
        self.blocks_per_seq = -(-LENGTH // block_size)
        self.step = StepInputs(4 * LENGTH, 8, self.blocks_per_seq, has_adapters=bool(shape.num_adapters))
        ops = ops or CpuOps(dtype, num_threads)
        self.cache = new_cache(shape, 5 * self.blocks_per_seq, block_size, kv_dtype or dtype)
        self.model = LlamaLike(ops, shape).compile(self.step, self.cache)

    def blocks(self, owner: int) -> list[int]:
        """Those of sequence `owner`, in an order of its own."""
        mine = range(owner * self.blocks_per_seq, (owner + 1) * self.blocks_per_seq)
        return list(mine) if owner % 2 else list(reversed(mine))

    def run(
        self, chunks: list[tuple[int, int, int]], outputs: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks (owner, start, end) of the same ids, each with its owner's adapter. Hidden states and logits of the
        last so many (or all) tokens."""
        filled = [
            Chunk(IDS[start:end], start, self.blocks(owner), adapter=owner % (self.num_adapters + 1))
            for owner, start, end in chunks
        ]
        fill_step(self.step, filled, self.block_size, outputs)
        hidden = self.model.forward().clone()
        rows = torch.arange(len(hidden), dtype=torch.int32)
        logits = [self.model.logits(some).clone() for some in torch.split(rows, 64)]
        return hidden, torch.cat(logits) if logits else hidden

    def keys_and_values(self, owner: int, length: int) -> torch.Tensor:
        # [block, layer, k|v, kv_head, slot, ...] to [token, layer, k|v, kv_head, ...]
        return as_movable(self.cache)[self.blocks(owner)].permute(0, 4, 1, 2, 3, 5).flatten(0, 1)[:length]


def in_one_go(
    shape: Shape, dtype: torch.dtype, kv_dtype: torch.dtype | None = None, owner: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    engine = Engine(shape, dtype, 16, 2, kv_dtype)
    hidden, logits = engine.run([(owner, 0, LENGTH)])
    return hidden, logits, engine.keys_and_values(owner, LENGTH)


# Computed once for each test that needs it.
expected_in_one_go = cache(in_one_go)
# Those with KV in 8 bits.
CODED = [("grouped", INT8), ("windowed", FP8)]


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "kv_dtype"), [*((name, None) for name in SHAPES), *CODED])
@settings(
    max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.differing_executors]
)
@given(data=st.data())
def test_chunks_outputs_batches_threads_and_blocks(
    name: str, kv_dtype: torch.dtype | None, dtype: torch.dtype, data: st.DataObject
) -> None:
    block_size = data.draw(st.sampled_from([8, 16, 32, 10]), "block size")
    engine = Engine(SHAPES[name], dtype, block_size, data.draw(st.integers(1, 5), "threads"), kv_dtype)
    cuts = data.draw(
        st.lists(
            st.lists(st.integers(1, LENGTH - 1), max_size=6, unique=True).map(sorted), min_size=1, max_size=4
        ),
        "cuts",
    )
    spans = [list(zip([0, *cut], [*cut, LENGTH], strict=True)) for cut in cuts]
    owners = range(len(cuts))
    # An owner's number modulo theirs is its adapter; 0: without one.
    expected = [
        expected_in_one_go(SHAPES[name], dtype, kv_dtype, owner % (engine.num_adapters + 1))
        for owner in owners
    ]
    while any(spans):
        ready = [owner for owner, left in enumerate(spans) if left]
        batch = data.draw(
            st.permutations(ready).flatmap(lambda p: st.integers(1, len(p)).map(lambda n: p[:n]))
        )
        chunks = [(owner, *spans[owner].pop(0)) for owner in batch]
        outputs = [data.draw(st.sampled_from(sorted({0, 1, end - start}))) for _, start, end in chunks]
        got_hidden, got_logits = engine.run(chunks, outputs)
        row = 0
        for (owner, _, end), wanted in zip(chunks, outputs, strict=True):
            hidden, logits, _ = expected[owner]
            assert torch.equal(got_hidden[row : row + wanted], hidden[end - wanted : end])
            assert torch.equal(got_logits[row : row + wanted], logits[end - wanted : end])
            row += wanted
        assert row == len(got_hidden)
    for owner in range(len(spans)):
        assert torch.equal(engine.keys_and_values(owner, LENGTH), expected[owner][2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_token_by_token(dtype: torch.dtype) -> None:
    engine = Engine(SHAPES["grouped"], dtype, 16, 2)
    hidden, logits, _ = expected_in_one_go(SHAPES["grouped"], dtype)
    for i in range(LENGTH):
        got_hidden, got_logits = engine.run([(1, i, i + 1)])
        assert torch.equal(got_hidden, hidden[i : i + 1]) and torch.equal(got_logits, logits[i : i + 1])


def test_the_callers_float_mode_does_not_matter() -> None:
    assert torch.set_flush_denormal(True)
    try:
        hidden, _, _ = in_one_go(SHAPES["grouped"], torch.float32)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(hidden, expected_in_one_go(SHAPES["grouped"], torch.float32)[0])


def test_adapters_make_a_difference() -> None:
    shape = SHAPES["adapters"]
    without, *others = (expected_in_one_go(shape, torch.float32, None, adapter)[0] for adapter in range(3))
    assert all((other - without).abs().max() > 0.1 * without.abs().max() for other in others)
