"""Where aligned batches would pay, worked out: the arithmetic, on examples that one can check by hand."""

from __future__ import annotations

import json

import pytest

from benchmarks import alignment
from benchmarks.alignment import RANK_PLANS, Step, filled, fitted, together_s


def test_a_tensor_parallel_rank_waits_for_the_longest_as_long_as_one_gpu() -> None:
    # 2 sequences fill the device: the longest of 100 costs as much as two of them
    step = Step(base_s=8.0, token_s=1.0, num_filling=2.0)
    assert step.seconds([100]) == 8 + 200
    # a quarter of the heads: 8 sequences fill the rank, each token takes it a quarter of the time
    assert step.of_rank(4, all_reduce_s=0.5).seconds([100]) == 8 / 4 + 0.5 + 200
    assert step.of_rank(1, all_reduce_s=0.5) == step


def test_sums_are_all_that_a_balanced_kernel_sees() -> None:
    rank = Step(base_s=8.0, token_s=1.0).of_rank(4, all_reduce_s=0.0)
    assert rank.seconds([100, 1, 1]) == rank.seconds([34, 34, 34]) == 2 + 102 / 4


def test_constants_are_found_again() -> None:
    step = Step(base_s=0.0, token_s=3e-6, num_filling=12.5)
    batches = [[100] * 40, [4000, *[100] * 40], [4000] * 20, [300, 20, 7]]
    points = [(lengths, step.seconds(lengths), step.seconds(lengths)) for lengths in batches]
    token_s, num_filling = fitted(points, is_plain=True)
    assert token_s == pytest.approx(3e-6) and num_filling == 12.5
    assert fitted([([10, 20], 60.0, 60.0)], is_plain=False) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("name", RANK_PLANS)
def test_plans_give_every_request_to_one_rank(name: str) -> None:
    lengths = [1, 2, 3, 4, 50, 60, 70, 80, 9, 9, 9, 9, 7, 7, 7, 7]
    plan = RANK_PLANS[name](lengths, 2, 4)
    assert [len(ranks) for ranks in plan] == [2, 2]
    assert {len(rank) for ranks in plan for rank in ranks} == {4}
    assert sorted(each for ranks in plan for rank in ranks for each in rank) == sorted(lengths)


def test_a_step_is_as_long_as_its_slowest_rank() -> None:
    step = Step(base_s=1.0, token_s=1.0)
    assert together_s(step, [[[10, 10], [1, 2]], [[3], [4]]]) == 21 + 5
    lengths = [1, 2, 3, 4, 40, 50, 60, 70]
    apart, alike = (
        together_s(step, RANK_PLANS[name](lengths, 2, 2))
        for name in ("aligned, a rank for each length", "aligned, all ranks alike at a time")
    )
    # 3 + 4 beside 40 + 50, and 1 + 2 .. 60 + 70 wait for the long ones in both steps; else only in one
    assert apart == (1 + 90) + (1 + 130)
    assert alike == (1 + 5) + (1 + 110)


def test_memory_is_filled_with_as_many_as_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alignment, "MOST_AT_ONCE", 3)
    assert filled([5, 5, 5, 1, 1, 1, 1], 10) == [[5, 5], [5, 1, 1], [1, 1]]


def test_it_agrees_with_what_was_measured() -> None:
    """The model is only worth something where it says what one GPU did: 19 cases, each within 5 %."""
    rows = json.loads((alignment.RESULTS / "gpu.json").read_text())["rows"]
    cases = alignment.cases_of(rows)
    assert len(cases) == 19
    for case in cases:
        if case.gain is not None:
            modelled = alignment.gain(case.step, alignment.measured_groups(case.batch))
            assert modelled == pytest.approx(case.gain, rel=0.05), case.name
