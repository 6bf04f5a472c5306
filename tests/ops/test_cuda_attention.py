"""Steps filled up to a shape, as they are when they are captured: whatever differs between steps of one shape is in
the device's buffers. FlashAttention itself is played by plain torch, from those buffers alone."""

from __future__ import annotations

import pytest
import torch

from alignedserve.kernels.kv_rows import FP8, INT8, from_rows, to_rows
from alignedserve.kernels.triton import shared_plan
from alignedserve.kv.groups import GroupedLayer, LayerGroups
from alignedserve.ops import cuda_attention
from alignedserve.ops.base import AttentionSpec
from alignedserve.ops.cuda_attention import CudaAttention
from alignedserve.ops.cuda_shapes import chunk_shapes
from alignedserve.ops.shared_plans import SharedPlans
from alignedserve.ops.step import StepInputs
from alignedserve.ops.step_shape import Ladder
from alignedserve.ops.torch_attention import paged_attention
from tests.kernels.tiny_model import Chunk, fill_step

HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 16, 4, 64
PLACE = GroupedLayer(0, 0)
WIDTH = (HEADS + 2 * KV_HEADS) * HEAD_DIM


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    query_start: torch.Tensor,
    context_start: torch.Tensor,
    max_query: int,
    max_context: int,
    scale: float,
    window: int | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """NaN in rows that are no sequence's. Like the real one it sees no more than `max_query` queries of each."""
    out, sums = torch.full_like(q, float("nan")), q.new_full((q.shape[1], len(q)), float("nan"))
    spans = zip(
        query_start[:-1].tolist(),
        query_start[1:].tolist(),
        context_start[:-1].tolist(),
        context_start[1:].tolist(),
        strict=True,
    )
    for first, end, first_key, end_key in spans:
        assert end_key - first_key <= max_context
        end = min(end, first + max_query)
        queries, keys, values = q[first:end], k[first_key:end_key], v[first_key:end_key]
        keys, values = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (keys, values))
        position = torch.arange(end_key - first_key)
        behind = position[len(keys) - len(queries) :, None] - position
        is_seen = (behind >= 0) & (behind < (window or len(keys)))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * scale
        scores = scores.masked_fill(~is_seen, float("-inf"))
        out[first:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
        sums[:, first:end] = scores.logsumexp(-1)
    return out, sums


@pytest.fixture(autouse=True)
def plain_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_attention, "has_flash_attention", lambda device, dtype: True)
    monkeypatch.setattr(cuda_attention, "flash_attention", flash_attention)


def chunks(*spans: tuple[int, int], is_reversed: bool = False) -> list[Chunk]:
    """Of (tokens before, tokens computed), each with blocks of its own. `is_reversed`: every second one is."""
    free = torch.randperm(NUM_BLOCKS).tolist()
    made: list[Chunk] = []
    for before, count in spans:
        num_blocks = -(-(before + count) // BLOCK_SIZE)
        made.append(Chunk([0] * count, before, free[:num_blocks], is_reversed and len(made) % 2 == 0))
        del free[:num_blocks]
    return made


STEPS = {
    "one prompt": [(0, 7)],
    "a prompt that goes on": [(9, 6)],
    "several": [(0, 5), (11, 3), (2, 2)],
    "decodes and chunks": [(5, 1), (17, 1), (0, 4), (8, 9)],
    "decodes that want no output": [(3, 1), (6, 1)],
}


@pytest.mark.drawn(one_in=13)
@pytest.mark.parametrize("kv_dtype", [torch.float32, FP8, INT8], ids=str)
@pytest.mark.parametrize("is_reversed", [False, True])
@pytest.mark.parametrize("kernel", ["balanced", "plain"])
@pytest.mark.parametrize(("window", "has_sinks"), [(None, False), (5, False), (5, True)])
@pytest.mark.parametrize("spans", STEPS.values(), ids=STEPS.keys())
def test_a_step_that_is_filled_up_computes_the_same(
    spans: list[tuple[int, int]],
    window: int | None,
    has_sinks: bool,
    kernel: str,
    is_reversed: bool,
    kv_dtype: torch.dtype,
) -> None:
    torch.manual_seed(0)
    work = chunks(*spans, is_reversed=is_reversed)
    cache = to_rows(torch.randn(NUM_BLOCKS, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), kv_dtype)
    sinks = torch.tensor([0.0, 2.0, -1.0, 30.0]) if has_sinks else None
    spec = AttentionSpec(0, HEADS, KV_HEADS, HEAD_DIM, 0.3, sliding_window=window, sinks=sinks)
    num_tokens = sum(count for _, count in spans)
    qkv = torch.randn(num_tokens, WIDTH)
    step = StepInputs(max_tokens=40, max_seqs=6, max_blocks_per_seq=8)
    step.has_reversed = is_reversed
    # of decodes none but the last wants an output, so that these are no step of decodes
    outputs = [0] * (len(work) - 1) + [1]
    fill_step(step, work, BLOCK_SIZE, outputs)
    expected_cache = cache.clone()
    expected = paged_attention(qkv, expected_cache, step, spec, PLACE)

    step.ladder = Ladder(chunk_shapes(step, cache))
    fill_step(step, work, BLOCK_SIZE, outputs)
    shape = step.shape
    assert shape.num_tokens == 16 + 16 * (num_tokens > 16) and shape.num_chunks == 6
    # what a step before this one left must not be seen
    padded = torch.full((shape.num_tokens, WIDTH), 1e4)
    padded[:num_tokens] = qkv
    attention = CudaAttention(cache, step, kernel)
    attention.begin()
    out = attention(padded, spec)
    torch.testing.assert_close(out[:num_tokens], expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(from_rows(cache), from_rows(expected_cache))
    assert step.output_rows(out).shape == (shape.num_outputs, HEADS * HEAD_DIM)
    torch.testing.assert_close(step.output_rows(out)[:1], expected[-1:], rtol=1e-4, atol=1e-4)


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("kv_dtype", [torch.float32, INT8], ids=str)
@pytest.mark.parametrize("kernel", ["balanced", "plain"])
@pytest.mark.parametrize("is_plain", [False, True], ids=["flash", "plainly"])
def test_blocks_before_the_window_may_be_gone(
    monkeypatch: pytest.MonkeyPatch, kernel: str, kv_dtype: torch.dtype, is_plain: bool
) -> None:
    """Where they were may hold NaN, and the block table names none."""
    if is_plain:
        monkeypatch.setattr(cuda_attention, "has_flash_attention", lambda device, dtype: False)
    torch.manual_seed(0)
    window = 5
    spec = AttentionSpec(0, HEADS, KV_HEADS, HEAD_DIM, 0.3, sliding_window=window)
    work = chunks((17, 1), (21, 1), (0, 4), (18, 9), (9, 2))
    cache = torch.randn(NUM_BLOCKS, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    qkv = torch.randn(17, WIDTH)
    step = StepInputs(max_tokens=40, max_seqs=6, max_blocks_per_seq=8)
    fill_step(step, work, BLOCK_SIZE)
    expected = paged_attention(qkv, to_rows(cache, kv_dtype), step, spec, PLACE)
    for chunk in work:
        num_passed = max(chunk.start + 1 - window, 0) // BLOCK_SIZE
        if kv_dtype == torch.float32:
            cache[chunk.blocks[:num_passed]] = float("nan")
        chunk.blocks[:num_passed] = [-1] * num_passed
    assert sum(block < 0 for chunk in work for block in chunk.blocks) == 3 + 4 + 3 + 1
    cache = to_rows(cache, kv_dtype)
    fill_step(step, work, BLOCK_SIZE)
    attention = CudaAttention(cache, step, kernel)
    attention.begin()
    torch.testing.assert_close(attention(qkv, spec), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(paged_attention(qkv, cache, step, spec, PLACE), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kv_dtype", [torch.float32, INT8], ids=str)
def test_plans_of_shared_keys_are_made_for_each_step_and_group(
    monkeypatch: pytest.MonkeyPatch, kv_dtype: torch.dtype
) -> None:
    """From a step's inputs alone, as a captured step needs it."""
    monkeypatch.setattr(shared_plan, "MIN_SAVED_PER_ROW", 1)
    monkeypatch.setattr(shared_plan, "MIN_SAVED_BYTES", 0)
    torch.manual_seed(0)
    step = StepInputs(max_tokens=40, max_seqs=6, max_blocks_per_seq=40, num_groups=2)
    groups = LayerGroups((PLACE, GroupedLayer(1, 0)), 1, num_full=2, num_sliding=0)
    cache = to_rows(torch.randn(90, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM), kv_dtype)
    attention = CudaAttention(cache, step, "shared", groups)
    assert isinstance(step.shared_plans, SharedPlans)
    common, elsewhere = list(range(32)), list(range(32, 64))
    # All three decodes have 128 tokens in common in the first group, and the last two in the second one.
    work = [
        Chunk(
            [0], 129 + seq, [*common, 64 + seq], other_groups=([*(elsewhere if seq else common), 67 + seq],)
        )
        for seq in range(3)
    ]
    prompt = Chunk([0] * 5, 2, [70, 71], other_groups=([72, 73],))
    found = []
    for chunks_of_step in (work, work[1:], [*work, prompt], work):
        fill_step(step, chunks_of_step, BLOCK_SIZE)
        step.upload()
        attention.begin()
        num_tokens = step.num_tokens
        for layer, place in enumerate(groups.layers):
            spec = AttentionSpec(layer, HEADS, KV_HEADS, HEAD_DIM, 0.3)
            qkv = torch.randn(num_tokens, WIDTH)
            expected = paged_attention(qkv, cache.clone(), step, spec, place)
            torch.testing.assert_close(attention(qkv, spec)[:num_tokens], expected, rtol=1e-4, atol=1e-4)
        plans = step.shared_plans._plans.values()
        found.append([plan.row_of_seq.view(-1, 4)[:3, 0].tolist() for plan in plans])
    # A layer asks for its plan in the first step.
    assert found == [
        [[0, 0, 0], [0, 0, 0]],
        [[128, 128, 0], [128, 128, 0]],
        [[128, 128, 128], [0, 128, 128]],
        [[128, 128, 128], [0, 128, 128]],
    ]
    step.commit_empty(step.shape)
    # Kernels read a plan's own copy, which is the old one until it is sent.
    assert all(int(plan.header[2]) > 0 for plan in plans)
    step.upload()
    assert all(int(plan.header[2]) == 0 for plan in plans)


def test_an_empty_step_of_a_shape_writes_nothing() -> None:
    """As it is captured."""
    step = StepInputs(max_tokens=40, max_seqs=6, max_blocks_per_seq=8)
    cache = torch.randn(NUM_BLOCKS, 1, 2, KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    before = cache.clone()
    fill_step(step, chunks((5, 1), (0, 9)), BLOCK_SIZE)
    for shape in chunk_shapes(step, cache):
        step.commit_empty(shape)
        attention = CudaAttention(cache, step, "balanced")
        attention.begin()
        spec = AttentionSpec(0, HEADS, KV_HEADS, HEAD_DIM, 0.3)
        assert attention(torch.randn(shape.num_tokens, WIDTH), spec).shape[0] == shape.num_tokens
    assert torch.equal(cache, before)
