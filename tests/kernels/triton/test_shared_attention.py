"""Keys that decoding sequences have in common are read once, and each result is the one that the sequence has alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from alignedserve.kernels.cpu.structs import Step
from alignedserve.kernels.kv_rows import FP8, INT8, as_movable, to_rows
from tests.kernels.triton.harness import DEVICE

triton = pytest.importorskip("triton")

from alignedserve.kernels.triton import shared_plan  # noqa: E402
from alignedserve.kernels.triton.decode_attention import (  # noqa: E402
    DecodeScratch,
    Tuning,
    balanced_attention,
    decode_attention_torch,
    decode_tuning,
)
from alignedserve.kernels.triton.decode_plan import make_plan_torch  # noqa: E402
from alignedserve.kernels.triton.paged_attention import PagedStep  # noqa: E402
from alignedserve.kernels.triton.shared_attention import (  # noqa: E402
    Shared,
    SharedScratch,
    SharedTuning,
    shared_tuning,
)
from alignedserve.kernels.triton.shared_plan import MAX_PARTS, SharedForm, SharedPlan  # noqa: E402

pytestmark = pytest.mark.slow

NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}
OWN = Tuning(tile=16, num_warps=4, num_stages=2, programs_per_sm=1)
# Three sequences of two heads per KV head fill a program.
FEW_ROWS = SharedTuning(rows=16, tile=32, programs_per_sm=1)


@dataclass(frozen=True)
class Seq:
    # It begins with this many blocks of an earlier sequence, and goes on with tokens of its own.
    parent: int | None
    num_blocks: int
    num_tokens: int
    # A sequence with more than one is a chunk.
    num_queries: int = 1
    is_reversed: bool = False


@dataclass(frozen=True)
class Heads:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32


class Case:
    def __init__(
        self,
        seqs: list[Seq],
        heads: Heads = Heads(),
        block_size: int = 16,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
        has_sinks: bool = False,
        group: int = 0,
        num_groups: int = 1,
    ) -> None:
        self.heads, self.block_size = heads, block_size
        blocks: list[list[int]] = []
        lengths: list[int] = []
        free = iter(torch.randperm(sum(seq.num_tokens // block_size + 1 for seq in seqs) + 3).tolist())
        for seq in seqs:
            common = [] if seq.parent is None else blocks[seq.parent][: lengths[seq.parent] // block_size]
            common = common[: seq.num_blocks]
            length = len(common) * block_size + seq.num_tokens
            own = -(-length // block_size) - len(common)
            blocks.append(common + [next(free) for _ in range(own)])
            lengths.append(length)
        columns = max(map(len, blocks)) + 2
        rows = torch.full((len(seqs), num_groups, columns), -7, dtype=torch.int32)
        values = torch.full(
            (len(list(free)) + sum(map(len, blocks)), 2, heads.num_kv_heads, block_size, heads.head_dim), NAN
        )
        for seq, ids, length, row in zip(seqs, blocks, lengths, rows[:, group], strict=True):
            row[: len(ids)] = torch.tensor(ids)
            for column, block in enumerate(ids):
                slots = min(block_size, length - column * block_size)
                own_slots = slice(block_size - slots, None) if seq.is_reversed else slice(slots)
                noise = torch.randn(2, heads.num_kv_heads, slots, heads.head_dim)
                # What is common has been written before.
                old = values[block, :, :, own_slots]
                values[block, :, :, own_slots] = torch.where(old.isnan(), noise, old)
        self.cache = to_rows(values.to(DEVICE, dtype), kv_dtype or dtype)
        counts = torch.tensor([seq.num_queries for seq in seqs])
        starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int()
        self.q = torch.randn(int(starts[-1]), heads.num_heads, heads.head_dim).to(DEVICE, dtype)
        self.sinks = torch.randn(heads.num_heads).mul(3).to(DEVICE, dtype) if has_sinks else None
        is_reversed = torch.tensor([seq.is_reversed for seq in seqs]).int()
        ends = zip(lengths, counts.tolist(), strict=True)
        positions = [position for length, count in ends for position in range(length - count, length)]
        self.host = starts.numpy(), np.array(positions, dtype=np.int32), is_reversed.numpy()
        self.host_table = rows.numpy().reshape(-1)[group * columns :]
        self.step = PagedStep(
            query_start=starts.to(DEVICE),
            context_len=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            block_table=rows.to(DEVICE),
            table_stride=torch.tensor([columns], dtype=torch.int32, device=DEVICE),
            num_seqs=len(seqs),
            is_reversed=is_reversed.to(DEVICE) if is_reversed.any() else None,
            group=group,
            num_groups=num_groups,
        )

    def shared(
        self,
        num_sms: int,
        window: int | None = None,
        least: tuple[int, int] = (1, 0),
        tuning: SharedTuning = FEW_ROWS,
    ) -> Shared:
        heads, device = self.heads, torch.device(DEVICE)
        scratch = SharedScratch(
            heads.num_heads, heads.head_dim, self.step.num_seqs + 3, num_sms, device, tuning
        )
        form = SharedForm(
            heads.num_kv_heads,
            tuning.rows,
            heads.num_heads // heads.num_kv_heads,
            self.block_size,
            tuning.tile,
            window,
            token_bytes=1,
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_plan, "MIN_SAVED_PER_ROW", least[0])
            patch.setattr(shared_plan, "MIN_SAVED_BYTES", least[1])
            plan = SharedPlan(form, self.step.num_seqs + 3, scratch.num_programs, device)
        shared = Shared(plan, scratch)
        self.fill(shared.plan)
        scratch.parts.values.fill_(NAN)
        scratch.parts.weights.fill_(NAN)
        return shared

    def fill(self, plan: SharedPlan) -> None:
        starts, positions, is_reversed = self.host
        plan.fill(
            Step(
                query_start=starts.ctypes.data,
                positions=positions.ctypes.data,
                is_reversed=is_reversed.ctypes.data,
                block_table=self.host_table.ctypes.data,
                block_table_stride=int(self.step.table_stride[0]) * self.step.num_groups,
                num_seqs=self.step.num_seqs,
            )
        )
        plan.upload()

    def run(self, num_sms: int, window: int | None, shared: Shared | None, own: Tuning = OWN) -> torch.Tensor:
        heads = self.heads
        scratch = DecodeScratch(
            heads.num_heads,
            heads.num_kv_heads,
            heads.head_dim,
            self.step.num_seqs,
            num_sms,
            torch.device(DEVICE),
            own,
        )
        plan = scratch.new_plan()
        scratch.make_plan(plan, self.step, heads.num_kv_heads, window, shared)
        expected = make_plan_torch(
            self.step.query_start.cpu(), self.step.context_len.cpu(), heads.num_kv_heads, scratch.num_programs,
            own.tile, window, shared.plan.row_of_seq.cpu() if shared else None,
        )  # fmt: skip
        torch.testing.assert_close(plan.cpu(), expected, rtol=0, atol=0)
        out = torch.full_like(self.q, 7.0)
        scale = heads.head_dim**-0.5
        balanced_attention(
            self.q, self.cache, self.step, plan, scratch, scale, window, out, self.sinks, shared
        )
        assert not scratch.num_done.any()
        return out

    def check(self, out: torch.Tensor, window: int | None = None) -> None:
        expected = decode_attention_torch(
            self.q, self.cache, self.step, self.heads.head_dim**-0.5, window, self.sinks
        )
        counts = self.step.query_start.diff()
        is_decode = torch.repeat_interleave(counts == 1, counts)
        assert (out[~is_decode] == 7.0).all()
        difference = (out[is_decode].double() - expected[is_decode]).norm(dim=(1, 2))
        assert (difference < TOLERANCE[self.q.dtype] * expected[is_decode].norm(dim=(1, 2))).all()


# Triton's interpreter multiplies matrices of bfloat16 as if they were integers.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")
HEADS = [Heads(), Heads(6, 2, 24), Heads(3, 3, 16), Heads(8, 1, 16)]


@st.composite
def trees(draw: st.DrawFn) -> list[Seq]:
    seqs: list[Seq] = []
    for number in range(draw(st.integers(1, 9))):
        parent = draw(st.none() | st.integers(0, number - 1)) if number else None
        is_chunk, is_reversed = draw(st.integers(0, 9)) == 0, draw(st.integers(0, 9)) == 0
        parents_reversed = parent is not None and seqs[parent].is_reversed
        seqs.append(
            Seq(
                parent,
                # Whole tiles are common, or nearly.
                draw(st.sampled_from([3, 4, 8, 9, 12, 99])),
                draw(st.integers(2, 9) | st.integers(2, 150)),
                2 if is_chunk else 1,
                # Sequences that begin alike fill their blocks from the same end.
                parents_reversed if parent is not None else is_reversed,
            )
        )
    return seqs


@settings(max_examples=20)
@given(
    seqs=trees(),
    heads=st.sampled_from(HEADS),
    block_size=st.sampled_from([8, 16, 32]),
    dtype=st.sampled_from(DTYPES),
    kv_dtype=st.sampled_from([None, None, FP8, INT8]),
    window=st.sampled_from([None, None, 1, 70, 200, 1000]),
    has_sinks=st.booleans(),
    num_sms=st.sampled_from([1, 3, 40]),
    group=st.integers(0, 1),
    seed=st.integers(0, 2**31),
)
def test_random_trees_agree_with_float64(
    seqs: list[Seq],
    heads: Heads,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    window: int | None,
    has_sinks: bool,
    num_sms: int,
    group: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    case = Case(seqs, heads, block_size, dtype, kv_dtype, has_sinks, group, num_groups=2)
    together = case.run(num_sms, window, case.shared(num_sms, window))
    case.check(together, window)
    alone = case.run(num_sms, window, None)
    torch.testing.assert_close(together, alone, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


# Seven sequences behind 128 tokens, four of which go on alike for another 64.
NESTED = [
    Seq(None, 0, 150),
    Seq(0, 8, 5),
    Seq(1, 8, 80),
    *[Seq(2, 12, 3 + number) for number in range(3)],
    Seq(0, 8, 40),
]


def units(shared: Shared) -> int:
    return int(shared.plan.header[2])


def behind(num_tokens: int, num_seqs: int, own: int = 5) -> list[Seq]:
    return [Seq(None, 0, num_tokens + own), *[Seq(0, num_tokens // 16, own)] * (num_seqs - 1)]


def test_common_keys_are_read_by_one_sequence_of_a_task() -> None:
    """Their blocks in the other sequences' tables are replaced by one that holds NaN."""
    case = Case(NESTED)
    shared = case.shared(3)
    case.check(case.run(3, None, shared))
    num_tasks = -(-len(NESTED) // 8)
    # 128 keys for each task, 64 more for four sequences.
    assert units(shared) == case.heads.num_kv_heads * (num_tasks * 4 + 2)
    own_key, task, row, _ = shared.plan.row_of_seq.view(-1, 4)[: len(NESTED)].T.cpu()
    assert own_key.tolist() == [128, 128, 192, 192, 192, 192, 128]
    assert (task == 0).all() and row.sort().values.tolist() == list(range(7))
    table = case.step.block_table[:, 0]
    nan_block = next(block for block in range(len(case.cache)) if case.cache[block].isnan().all())
    case_table = table.clone()
    order = row.argsort().tolist()
    first_deep = next(seq for seq in order if own_key[seq] == 192)
    for seq in order[1:]:
        table[seq, : 8 if seq == first_deep else own_key[seq] // 16] = nan_block
    out = case.run(3, None, shared)
    table.copy_(case_table)
    case.check(out)


def test_a_tree_with_more_sequences_than_rows_is_cut_where_least_is_common() -> None:
    # Six sequences behind 64 tokens and six behind 192, of which 64 are the same. Eight fit into a task.
    seqs = [Seq(None, 0, 69), *[Seq(0, 4, 9)] * 5, Seq(0, 4, 140), *[Seq(6, 12, 3)] * 5]
    case = Case(seqs)
    shared = case.shared(5)
    case.check(case.run(5, None, shared))
    tasks = shared.plan.tasks.view(-1, 8)[:2, 1].tolist()
    assert sorted(tasks) == [6, 6]
    assert units(shared) == 2 * (2 + 6)
    # Nothing is gained by a cut elsewhere.
    case = Case(behind(64, 17))
    shared = case.shared(5)
    assert shared.plan.tasks.view(-1, 8)[:2, 1].tolist() == [8, 8] and units(shared) == 2 * 2 * 2
    case.check(case.run(5, None, shared))


def test_sequences_that_the_window_cuts_off_read_alone() -> None:
    case = Case([*behind(128, 3), Seq(0, 8, 61), Seq(0, 8, 62)])
    shared = case.shared(3, window=189)
    assert shared.plan.row_of_seq.view(-1, 4)[:5, 0].tolist() == [128, 128, 128, 128, 0]
    case.check(case.run(3, 189, shared), 189)
    assert units(case.shared(3, window=100)) == 0


def test_tasks_must_save_more_than_they_cost() -> None:
    case = Case(behind(128, 3))
    # Two of three read 128 keys less.
    saved = 2 * 128
    assert units(case.shared(3, least=(saved // 3, saved))) > 0
    assert units(case.shared(3, least=(saved // 3 + 1, saved))) == 0
    too_little = case.shared(3, least=(1, saved + 1))
    assert units(too_little) == 0
    case.check(case.run(3, None, too_little))


def test_a_plan_is_made_again_for_each_step() -> None:
    """In the same memory, as CUDA graphs need it. What earlier steps left is not seen."""
    case = Case(NESTED)
    shared = case.shared(3)
    place = shared.plan.header.data_ptr()
    fewer = Case(behind(64, 3))
    for each in (fewer, Case([Seq(None, 0, 70)] * 4), case):
        each.fill(shared.plan)
        each.check(each.run(3, None, shared))
    shared.plan.clear()
    shared.plan.upload()
    case.check(case.run(3, None, shared))
    assert units(shared) == 0 and shared.plan.header.data_ptr() == place


@pytest.mark.parametrize("num_sms", [1, 13, 200])
def test_a_task_has_at_most_as_many_parts_as_rows_add_up(num_sms: int) -> None:
    case = Case(behind(5120, 2), Heads(2, 1, 16))
    shared = case.shared(num_sms)
    per_program, total = shared.plan.header[1:3].tolist()
    assert total == 160 and per_program == max(-(-total // num_sms), -(-total // (MAX_PARTS - 1)))
    case.check(case.run(4, None, shared))


def test_two_sequences_must_fit_into_a_program() -> None:
    form = SharedForm(1, 64, 64, 16, 64, None, 4096)
    with pytest.raises(ValueError, match="heads_per_kv=64: two sequences need 128 rows"):
        SharedPlan(form, 4, 8, torch.device("cpu"))


@pytest.mark.parametrize("tile", [0, 48, 128])
def test_tiles_must_divide_those_of_the_plan(tile: int) -> None:
    form = SharedForm(1, 64, 4, 16, tile, None, 4096)
    with pytest.raises(ValueError, match=f"tile={tile}: must divide 64"):
        SharedPlan(form, 4, 8, torch.device("cpu"))


@pytest.mark.parametrize("head_dim", [128, 256])
def test_what_is_launched_in_16_bits_by_default(head_dim: int) -> None:
    case = Case(NESTED, Heads(4, 1, head_dim), dtype=torch.float16)
    tuning, own = shared_tuning(head_dim, 2), decode_tuning(4, head_dim, 2, is_shared=True)
    assert (tuning.rows, tuning.tile) == (64, 64 if head_dim == 128 else 32)
    shared = case.shared(1, tuning=tuning)
    assert shared.plan.row_of_seq.view(-1, 4)[: len(NESTED), 0].tolist() == [
        128,
        128,
        192,
        192,
        192,
        192,
        128,
    ]
    case.check(case.run(1, None, shared, own))


@pytest.mark.parametrize("kv_dtype", [None, INT8])
def test_values_that_are_not_finite_stay_in_their_sequences(kv_dtype: torch.dtype | None) -> None:
    case = Case(NESTED, kv_dtype=kv_dtype)
    case.q[1] = NAN
    # Sequences 2 to 5 attend to this block.
    case.cache[case.step.block_table[3, 0, 10]] = as_movable(case.cache)[-1].view(case.cache.dtype)
    out = case.run(3, None, case.shared(3))
    assert out[1:6].isnan().all() and out[[0, 6]].isfinite().all()
