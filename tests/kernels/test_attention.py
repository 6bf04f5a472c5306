from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from alignedserve.kernels.kv_rows import FP8, INT8
from alignedserve.ops.base import AttentionSpec, Ops, Value
from alignedserve.ops.cpu_ops import CpuOps
from alignedserve.ops.step import StepInputs
from alignedserve.ops.torch_ops import TorchOps
from tests.kernels.harness import DTYPES, assert_close, randn
from tests.kernels.tiny_model import Chunk, LlamaLike, Shape, fill_step, new_cache, rope_table

BF16 = torch.bfloat16
IDS = torch.randint(0, 101, (400,), generator=torch.Generator().manual_seed(0)).tolist()


def one_layer(**changes: object) -> Shape:
    return Shape(num_layers=1, **changes)  # type: ignore[arg-type]


def attention_spec(ops: Ops, shape: Shape) -> AttentionSpec:
    def norm(seed: int) -> torch.Tensor | None:
        return ops.parameter(1 + randn(shape.head_dim, seed=seed, dtype=BF16) / 8) if shape.qk_norm else None

    return AttentionSpec(
        layer=0,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        sliding_window=shape.sliding_window,
        rope=rope_table(shape.max_position, shape.rotary) if shape.rope else None,
        q_norm=norm(1),
        k_norm=norm(2),
        sinks=ops.parameter(3 * randn(shape.num_heads, seed=3, dtype=BF16)) if shape.sinks else None,
    )


class Runner:
    """Attention alone, over rows of q, k and v that a token's id chooses."""

    def __init__(
        self,
        ops: Ops,
        shape: Shape,
        block_size: int,
        num_blocks: int = 80,
        kv_dtype: torch.dtype | None = None,
    ) -> None:
        self.block_size = block_size
        self.step = StepInputs(512, 8, num_blocks)
        self.cache = new_cache(
            shape, num_blocks, block_size, kv_dtype or ops.dtype, 0.0 if ops.name == "torch" else math.nan
        )
        table = ops.parameter(
            randn(101, (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim, dtype=BF16)
        )
        spec = attention_spec(ops, shape)
        head = ops.linear_weight([torch.ones(1, shape.num_heads * shape.head_dim)])
        ops.bind_cache(self.cache)
        self.model = ops.compile(
            lambda step: ops.attention(ops.embed(table, step.token_ids), spec),
            lambda x: ops.linear(x, head),
            self.step,
            max_rows=1,
        )

    def run(self, *chunks: Chunk) -> torch.Tensor:
        fill_step(self.step, list(chunks), self.block_size)
        return self.model.forward().clone()


def scattered(num: int, start: int = 0) -> list[int]:
    """Blocks in no order, distinct for distinct starts."""
    return [(37 * (start + i)) % 79 for i in range(num)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 72, 80, 96, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), [(4, 4, 16), (6, 2, 8), (7, 1, 32)])
def test_mixed_batch(
    dtype: torch.dtype, head_dim: int, num_heads: int, num_kv_heads: int, block_size: int
) -> None:
    shape = one_layer(head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads)
    check(dtype, shape, block_size)


@pytest.mark.parametrize("kv_dtype", [FP8, INT8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 32, 72, 128, 256])
@pytest.mark.parametrize(("num_heads", "num_kv_heads", "block_size"), [(6, 2, 8), (7, 1, 32)])
def test_kv_in_8_bits(
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    head_dim: int,
    num_heads: int,
    num_kv_heads: int,
    block_size: int,
) -> None:
    """What is compared with is written from the same values, which bfloat16 can hold."""
    shape = one_layer(head_dim=head_dim, num_heads=num_heads, num_kv_heads=num_kv_heads, rope=False)
    check(dtype, shape, block_size, kv_dtype)


@pytest.mark.parametrize("kv_dtype", [FP8, INT8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kv_in_8_bits_within_a_window(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    check(dtype, one_layer(sliding_window=50, rope=False), 16, kv_dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [1, 3, 64, 100])
def test_sliding_window(dtype: torch.dtype, window: int) -> None:
    check(dtype, one_layer(sliding_window=window), 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rope", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_rotation_and_head_norms(dtype: torch.dtype, rope: bool, qk_norm: bool) -> None:
    check(dtype, one_layer(rope=rope, qk_norm=qk_norm, head_dim=32), 16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize("kv_dtype", [None, INT8])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (7, 1), (3, 3)])
def test_sinks(
    dtype: torch.dtype, window: int | None, kv_dtype: torch.dtype | None, num_heads: int, num_kv_heads: int
) -> None:
    """Other tests compare torch's attention with transformers'."""
    shape = one_layer(
        sinks=True,
        sliding_window=window,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        rope=kv_dtype is None,
    )
    check(dtype, shape, 16, kv_dtype)


@pytest.mark.parametrize("backend", [CpuOps, TorchOps])
def test_a_sink_takes_its_share_of_each_token_once(backend: Callable[..., Ops]) -> None:
    """Of values that are all one, what is left is the share of all keys."""
    ops = backend(torch.float32)
    sinks, count = torch.tensor([-200.0, 0.0, 2.5, 200.0]), 150
    step, cache = StepInputs(512, 8, 16), torch.zeros(16, 1, 2, 2, 16, 8)
    spec = AttentionSpec(0, 4, 2, 8, 1.0, sinks=ops.parameter(sinks))
    table = ops.parameter(torch.cat([torch.zeros(1, 48), torch.ones(1, 16)], dim=1))
    head = ops.linear_weight([torch.ones(1, 32)])
    ops.bind_cache(cache)
    model = ops.compile(
        lambda step: ops.attention(ops.embed(table, step.token_ids), spec),
        lambda x: ops.linear(x, head),
        step,
        max_rows=1,
    )
    fill_step(step, [Chunk([0] * count, 0, list(range(10)))], 16)
    found = model.forward().view(count, 4, 8)
    num_keys = torch.arange(1, count + 1).view(-1, 1)
    expected = num_keys / (num_keys + sinks.double().exp())
    torch.testing.assert_close(found.double(), expected.unsqueeze(2).expand_as(found), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rotary_dim", [2, 6, 24, 30])
def test_a_part_of_each_head_is_rotated(dtype: torch.dtype, rotary_dim: int) -> None:
    check(dtype, one_layer(head_dim=32, rotary_dim=rotary_dim, qk_norm=rotary_dim == 24), 16)


@pytest.mark.parametrize("rotary_dim", [0, 34])
def test_tables_that_fit_no_head_are_refused(rotary_dim: int) -> None:
    with pytest.raises(
        ValueError, match=f"rope must be an even number of values wide, at most 32, not {rotary_dim}"
    ):
        Runner(CpuOps(torch.float32), one_layer(head_dim=32, rotary_dim=rotary_dim), 16)


def check(dtype: torch.dtype, shape: Shape, block_size: int, kv_dtype: torch.dtype | None = None) -> None:
    actual = Runner(CpuOps(dtype), shape, block_size, kv_dtype=kv_dtype)
    expected = Runner(TorchOps(torch.float32), shape, block_size, kv_dtype=kv_dtype)
    num_blocks = -(-200 // block_size)
    prompt = scattered(num_blocks)
    other = scattered(8, num_blocks)
    steps = [
        [Chunk(IDS[:5], 0, other), Chunk(IDS[:150], 0, prompt)],
        [Chunk(IDS[150:151], 150, prompt), Chunk(IDS[5:6], 5, other)],
        [Chunk(IDS[6:50], 6, other), Chunk([], 151, prompt)],
        [Chunk(IDS[151:200], 151, prompt)],
    ]
    for chunks in steps:
        assert_close(actual.run(*chunks), expected.run(*chunks))


@pytest.mark.parametrize("backend", [CpuOps, TorchOps])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "kv_dtype"), [(None, None), (20, None), (None, FP8), (20, INT8)])
def test_two_sequences_share_blocks_from_both_ends(
    dtype: torch.dtype, window: int | None, kv_dtype: torch.dtype | None, backend: Callable[..., Ops]
) -> None:
    """They compute what each computes with blocks of its own. The third block is both's: the first sequence fills its
    slots 0 .. 7, and the other 15 .. 8."""
    # Rotated, K in bfloat16 would be rounded before it is put into 8 bits.
    shape = one_layer(sliding_window=window, rope=kv_dtype is None)
    shared = Runner(backend(dtype), shape, 16, kv_dtype=kv_dtype)
    alone = Runner(TorchOps(torch.float32), shape, 16, kv_dtype=kv_dtype)
    left = scattered(3)
    right = [*scattered(2, 20), left[2]]
    for count in (20, 1, 18, 1):
        start, spans = shared_so_far(shared), []
        for ids, blocks, is_reversed in ((IDS[:60], left, False), (IDS[100:160], right, True)):
            spans.append((ids[start : start + count], blocks, is_reversed))
        actual = shared.run(*[Chunk(ids, start, blocks, flag) for ids, blocks, flag in spans])
        apart = [scattered(3), scattered(3, 10)]
        expected = alone.run(*[Chunk(ids, start, own) for (ids, _, _), own in zip(spans, apart, strict=True)])
        assert_close(actual, expected)


def shared_so_far(runner: Runner) -> int:
    return int(runner.step.context_len[0]) if runner.step.num_seqs else 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_empty_step_does_nothing(dtype: torch.dtype) -> None:
    runner = Runner(CpuOps(dtype), one_layer(), 16)
    assert runner.run().shape == (0, 64)
    assert runner.run(Chunk([], 0, [1])).shape == (0, 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_unwritten_cache_is_never_read(dtype: torch.dtype) -> None:
    runner = Runner(CpuOps(dtype), one_layer(), 16)
    assert not runner.run(Chunk(IDS[:70], 0, scattered(5))).isnan().any()


@pytest.mark.parametrize("name", ["cpu", "torch"])
def test_the_last_layer_yields_outputs_only(name: str) -> None:
    """Each sequence's last none, one or all tokens: the rows that the same model yields for all of them."""
    shape = Shape(num_layers=2)
    chunks = [Chunk(IDS[:90], 0, scattered(6)), Chunk(IDS[:7], 0, [5]), Chunk(IDS[:3], 0, [70])]
    rows = []
    for outputs in (None, [1, 7, 0], [0, 0, 0]):
        ops: Ops = CpuOps(torch.float32) if name == "cpu" else TorchOps(torch.float32)
        step = StepInputs(512, 8, 80)
        model = LlamaLike(ops, shape).compile(step, new_cache(shape, 80, 16, torch.float32, 0.0))
        fill_step(step, chunks, 16, outputs)
        rows.append(model.forward().clone())
    everything, some, none = rows
    assert len(everything) == 100 and len(none) == 0
    torch.testing.assert_close(some, everything[89:97])


def test_tokens_and_outputs_do_not_mix() -> None:
    ops = CpuOps(torch.float32)
    step = StepInputs(8, 1, 4)
    table, layer = ops.parameter(torch.ones(4, 8)), ops.linear_weight([torch.ones(8, 8)])

    def residual_of_all(step: StepInputs) -> Value:
        x = ops.embed(table, step.token_ids)
        return ops.linear(ops.outputs(x), layer, residual=x)

    def outputs_twice(step: StepInputs) -> Value:
        return ops.outputs(ops.outputs(ops.embed(table, step.token_ids)))

    for forward in (residual_of_all, outputs_twice):
        with pytest.raises(ValueError, match="outputs only"):
            ops.compile(forward, lambda x: ops.linear(x, layer), step, 1)


def test_wrong_shapes_are_named() -> None:
    ops = CpuOps(torch.float32)
    shape = one_layer()
    model = LlamaLike(ops, shape)
    step = StepInputs(8, 1, 4)
    with pytest.raises(ValueError, match="bind_cache"):
        ops.compile(model.forward, model.logits, step, 1)
    with pytest.raises(ValueError, match="cache must have contiguous blocks"):
        ops.bind_cache(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"cache must be torch\.float32"):
        ops.bind_cache(new_cache(shape, 4, 16, torch.bfloat16))
    ops.bind_cache(new_cache(one_layer(head_dim=32), 4, 16, torch.float32))
    with pytest.raises(ValueError, match="kv heads of 32"):
        ops.compile(model.forward, model.logits, step, 1)
