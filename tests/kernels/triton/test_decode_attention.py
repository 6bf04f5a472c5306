from __future__ import annotations

import pytest
import torch

from tests.kernels.triton.harness import DEVICE

triton = pytest.importorskip("triton")

from alignedserve.kernels.triton.decode_attention import (  # noqa: E402
    DecodeScratch,
    Tuning,
    balanced_attention,
    decode_attention_torch,
    plain_attention,
)
from alignedserve.kernels.triton.decode_plan import make_plan_torch  # noqa: E402
from alignedserve.kernels.triton.paged_attention import PagedStep  # noqa: E402

pytestmark = pytest.mark.slow

BLOCK_SIZE = 16
NAN = float("nan")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 1e-2}


class Case:
    """Sequences whose blocks lie anywhere in a cache that holds NaN wherever nothing was written."""

    def __init__(
        self,
        lengths: list[int],
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        num_queries: list[int] | None = None,
        reversed_seqs: tuple[int, ...] = (),
        sinks: torch.Tensor | None = None,
        group: int = 0,
        num_groups: int = 1,
    ) -> None:
        num_blocks = [-(-length // BLOCK_SIZE) for length in lengths]
        ids = torch.randperm(sum(num_blocks) + 5).int()
        cache = torch.full((len(ids), 2, 2, num_kv_heads, BLOCK_SIZE, head_dim), NAN)
        columns = max(num_blocks) + 3
        rows = torch.full((len(lengths), num_groups, columns), -7, dtype=torch.int32)
        table = rows[:, group]
        for seq, (length, count) in enumerate(zip(lengths, num_blocks, strict=True)):
            table[seq, :count], ids = ids[:count], ids[count:]
            for position in range(length):
                block, slot = int(table[seq, position // BLOCK_SIZE]), position % BLOCK_SIZE
                slot = BLOCK_SIZE - 1 - slot if seq in reversed_seqs else slot
                cache[block, :, :, :, slot] = torch.randn(2, 2, num_kv_heads, head_dim)
        counts = torch.tensor(num_queries or [1] * len(lengths))
        starts = torch.cat([torch.zeros(1, dtype=torch.long), counts.cumsum(0)]).int()
        q = torch.randn(int(starts[-1]), num_heads, head_dim)
        self.sinks = None if sinks is None else sinks.to(DEVICE, dtype)
        self.q, self.cache = q.to(DEVICE, dtype), cache.to(DEVICE, dtype)
        self.step = PagedStep(
            query_start=starts.to(DEVICE),
            context_len=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            block_table=rows.to(DEVICE),
            table_stride=torch.tensor([columns], dtype=torch.int32, device=DEVICE),
            num_seqs=len(lengths),
            is_reversed=torch.tensor([seq in reversed_seqs for seq in range(len(lengths))]).to(DEVICE).int()
            if reversed_seqs
            else None,
            group=group,
            num_groups=num_groups,
        )

    @property
    def layer(self) -> torch.Tensor:
        return self.cache[:, 1]

    def balanced(
        self, num_sms: int, tuning: Tuning, window: int | None = None, times: int = 1
    ) -> torch.Tensor:
        num_heads, head_dim = self.q.shape[1:]
        num_kv_heads = self.cache.shape[3]
        scratch = DecodeScratch(
            num_heads, num_kv_heads, head_dim, self.step.num_seqs, num_sms, torch.device(DEVICE), tuning
        )
        plan = scratch.new_plan()
        scratch.make_plan(plan, self.step, num_kv_heads, window)
        expected = make_plan_torch(
            self.step.query_start.cpu(), self.step.context_len.cpu(), num_kv_heads,
            scratch.num_programs, tuning.tile, window,
        )  # fmt: skip
        torch.testing.assert_close(plan.cpu(), expected, rtol=0, atol=0)
        for _ in range(times):
            out = torch.full_like(self.q, 7.0)
            balanced_attention(
                self.q, self.layer, self.step, plan, scratch, head_dim**-0.5, window, out, self.sinks
            )
        assert not scratch.num_done.any()
        return out

    def plain(self, tuning: Tuning, window: int | None = None) -> torch.Tensor:
        out = torch.full_like(self.q, 7.0)
        scale = self.q.shape[2] ** -0.5
        return plain_attention(self.q, self.layer, self.step, scale, window, out, tuning, self.sinks)

    def check(self, out: torch.Tensor, window: int | None = None) -> None:
        scale = self.q.shape[2] ** -0.5
        expected = decode_attention_torch(self.q, self.layer, self.step, scale, window, self.sinks)
        counts = self.step.query_start.diff()
        is_decode = torch.repeat_interleave((counts == 1) & (self.step.context_len > 0), counts)
        assert (out[~is_decode] == 7.0).all()
        difference = (out[is_decode].double() - expected[is_decode]).norm() / expected[is_decode].norm()
        assert difference < TOLERANCE[self.q.dtype]


SMALL = Tuning(tile=16, num_warps=4, num_stages=2, programs_per_sm=1)


# Triton's interpreter multiplies matrices of bfloat16 as if they were integers.
DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda")


@pytest.mark.drawn(one_in=3)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"), [(8, 2, 64), (3, 3, 80), (6, 3, 96), (8, 1, 128), (4, 2, 256)]
)
def test_every_form_agrees_with_float64(
    dtype: torch.dtype, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    case = Case([1, 33, 17, 100, 16], num_heads, num_kv_heads, head_dim, dtype)
    case.check(case.plain(SMALL))
    case.check(case.balanced(5, SMALL))


@pytest.mark.slow
@pytest.mark.parametrize("num_sms", [1, 2, 7, 64, pytest.param(300, marks=pytest.mark.drawn(one_in=4))])
def test_any_number_of_programs_gives_the_same(num_sms: int) -> None:
    case = Case([5, 250, 1, 64], 4, 2, 64, torch.float32)
    case.check(case.balanced(num_sms, SMALL, times=2))


@pytest.mark.parametrize("window", [1, 16, 40, 1000])
def test_sliding_window(window: int) -> None:
    case = Case([7, 120, 41, 16], 4, 2, 64, torch.float32)
    case.check(case.balanced(6, SMALL, window), window)
    case.check(case.plain(SMALL, window), window)


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("group", [0, 2])
def test_each_group_of_layers_has_rows_of_its_own(group: int, window: int | None) -> None:
    case = Case([7, 120, 41, 16], 4, 2, 64, torch.float32, group=group, num_groups=3)
    case.check(case.balanced(6, SMALL, window), window)
    case.check(case.plain(SMALL, window), window)


@pytest.mark.parametrize("window", [None, 20])
def test_reversed_sequences_beside_others(window: int | None) -> None:
    case = Case([7, 120, 41, 16], 4, 2, 64, torch.float32, reversed_seqs=(0, 2))
    case.check(case.balanced(6, SMALL, window), window)
    case.check(case.plain(SMALL, window), window)


@pytest.mark.drawn(one_in=5)
@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("num_sms", [1, 7, 64])
def test_sinks_count_once_however_a_head_is_cut(num_sms: int, dtype: torch.dtype, window: int | None) -> None:
    sinks = torch.tensor([-3.0, 0.5, 2.0, 5.0, 1.0, 20.0])
    case = Case([7, 250, 1, 64], 6, 2, 64, dtype, sinks=sinks)
    case.check(case.balanced(num_sms, SMALL, window, times=2), window)
    case.check(case.plain(SMALL, window), window)


def test_chunks_and_padding_are_left_alone() -> None:
    case = Case([40, 50, 0, 33, 0, 0], 4, 2, 64, torch.float32, num_queries=[1, 20, 1, 1, 0, 0])
    case.check(case.balanced(5, SMALL))
    case.check(case.plain(SMALL))


def test_nobody_has_anything_to_do() -> None:
    case = Case([0, 0], 4, 2, 64, torch.float32)
    assert (case.balanced(5, SMALL) == 7.0).all()


def test_wrong_shapes_are_named() -> None:
    case = Case([4], 4, 2, 64, torch.float32)
    with pytest.raises(ValueError, match="q must be"):
        plain_attention(case.q[:, :3], case.layer, case.step, 1.0, None, case.q, SMALL)
    with pytest.raises(ValueError, match=r"sinks must be contiguous, one for each of 4 heads, not \(3,\)"):
        plain_attention(case.q, case.layer, case.step, 1.0, None, case.q, SMALL, torch.zeros(3))
    with pytest.raises(ValueError, match="dtype"):
        plain_attention(case.q.half(), case.layer, case.step, 1.0, None, case.q, SMALL)
