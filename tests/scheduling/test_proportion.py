"""In virtual time: how many instances compute prompts, and how many decode."""

from __future__ import annotations

import math

import pytest

from alignedserve.protocol.messages import DECODE, PREFILL
from alignedserve.scheduling.proportion import (
    BEST_EFFORT_WAIT_S,
    LACKING_S,
    PAUSE_S,
    RECENT_S,
    SHORT_WAIT,
    SPARE_RATE,
    UNSTATED_WAIT_S,
    Decoding,
    Proportion,
    Seen,
)
from alignedserve.timing.cost_presets import load_cost_model

COST = load_cost_model("opt-13b/a100-80gb")
TTFT_S, TBT_S = 1.0, 0.1
NOBODY = Decoding(num_requests=0, num_tokens=0, max_tokens=10_000, max_requests=100)


def seen(
    now: float = 100.0,
    num_prefill: int = 2,
    num_decode: int = 2,
    rt_work_s: float = 0.0,
    be_work_s: float = 0.0,
    decoding: Decoding = NOBODY,
) -> Seen:
    return Seen(now, num_prefill, num_decode, rt_work_s, be_work_s, decoding)


def with_objectives() -> Proportion:
    proportion = Proportion()
    proportion.arrivals.add(0.0, TTFT_S, TBT_S, 0.0)
    return proportion


def full(share: float) -> Decoding:
    """The blocks of two instances that decode, used up to this share."""
    return Decoding(num_requests=10, num_tokens=round(share * 20_000), max_tokens=10_000, max_requests=100)


def test_nothing_changes_while_nothing_waits_and_nothing_is_full() -> None:
    assert with_objectives().wanted(seen()) is None


def test_prompts_that_wait_for_a_share_of_their_objective_get_an_instance() -> None:
    waits_s = 2 * SHORT_WAIT * TTFT_S
    assert with_objectives().wanted(seen(rt_work_s=waits_s * 0.99)) is None
    assert with_objectives().wanted(seen(rt_work_s=waits_s * 1.01)) == PREFILL


def test_where_nobody_asked_for_an_objective_they_may_wait_longer() -> None:
    assert Proportion().wanted(seen(rt_work_s=2 * UNSTATED_WAIT_S * 0.99)) is None
    assert Proportion().wanted(seen(rt_work_s=2 * UNSTATED_WAIT_S * 1.01)) == PREFILL


def test_best_effort_has_patience() -> None:
    assert with_objectives().wanted(seen(be_work_s=2 * BEST_EFFORT_WAIT_S * 0.99)) is None
    assert with_objectives().wanted(seen(be_work_s=2 * BEST_EFFORT_WAIT_S * 1.01)) == PREFILL


def test_who_decodes_spares_none_if_the_rest_would_be_full() -> None:
    assert with_objectives().wanted(seen(rt_work_s=9.0, decoding=full(0.4))) == PREFILL
    assert with_objectives().wanted(seen(rt_work_s=9.0, decoding=full(0.5))) is None


def test_the_last_of_a_role_stays() -> None:
    assert with_objectives().wanted(seen(num_decode=1, rt_work_s=9.0)) is None
    assert with_objectives().wanted(seen(num_prefill=1, decoding=full(1.0))) is None


def test_those_that_decode_get_an_instance_when_blocks_are_used_up() -> None:
    assert with_objectives().wanted(seen(decoding=full(0.9))) is None
    assert with_objectives().wanted(seen(decoding=full(1.0))) == DECODE


def test_or_when_iterations_would_be_too_long() -> None:
    def decoding(num_requests: int, tbt_s: float) -> Decoding:
        return Decoding(num_requests, num_requests * 1000, 10**9, 10**9, COST, tbt_s)

    assert decoding(400, TBT_S).load(1) > 1.0 > decoding(400, TBT_S).load(8)
    assert with_objectives().wanted(seen(decoding=decoding(800, TBT_S))) == DECODE
    assert with_objectives().wanted(seen(decoding=decoding(800, math.inf))) is None


def test_who_computes_prompts_spares_none_if_they_would_wait() -> None:
    waits_s = SHORT_WAIT * TTFT_S
    assert with_objectives().wanted(seen(rt_work_s=waits_s * 0.99, decoding=full(1.0))) == DECODE
    assert with_objectives().wanted(seen(rt_work_s=waits_s * 1.01, decoding=full(1.0))) is None


@pytest.mark.parametrize(("per_s", "wanted"), [(SPARE_RATE * 0.9, DECODE), (SPARE_RATE * 1.1, None)])
def test_nor_if_more_comes_than_the_rest_could_do(per_s: float, wanted: str | None) -> None:
    proportion = with_objectives()
    for second in range(int(20 * RECENT_S)):
        proportion.arrivals.add(per_s, TTFT_S, TBT_S, float(second))
    now = 20 * RECENT_S - 0.5
    assert proportion.arrivals.rate(now) == pytest.approx(per_s, rel=0.02)
    assert proportion.wanted(seen(now, decoding=full(1.0))) == wanted


def test_what_came_long_ago_is_forgotten() -> None:
    proportion = with_objectives()
    proportion.arrivals.add(100.0, TTFT_S, TBT_S, 0.0)
    assert proportion.wanted(seen(1.0, decoding=full(1.0))) is None
    assert proportion.wanted(seen(10 * RECENT_S, decoding=full(1.0))) == DECODE


def test_a_while_passes_between_two_changes() -> None:
    proportion = with_objectives()
    proportion.changed(100.0)
    assert proportion.wanted(seen(100.0 + 0.99 * PAUSE_S, rt_work_s=9.0)) is None
    assert proportion.wanted(seen(100.0 + 1.01 * PAUSE_S, rt_work_s=9.0)) == PREFILL


@pytest.mark.parametrize(("num_prefill", "num_decode", "lacking"), [(0, 2, PREFILL), (3, 0, DECODE)])
def test_a_role_that_nobody_has_is_taken_after_a_while(
    num_prefill: int, num_decode: int, lacking: str
) -> None:
    """One that died is started again before that."""
    proportion = with_objectives()

    def wanted(now: float) -> str | None:
        return proportion.wanted(seen(now, num_prefill, num_decode))

    assert wanted(50.0) is None
    assert wanted(50.0 + 0.99 * LACKING_S) is None
    assert wanted(50.0 + 1.01 * LACKING_S) == lacking
    assert proportion.wanted(seen(60.0)) is None
    assert wanted(61.0) is None


def test_the_only_one_does_not_change() -> None:
    proportion = with_objectives()
    for now in (50.0, 50.0 + 2 * LACKING_S):
        assert proportion.wanted(seen(now, num_prefill=1, num_decode=0)) is None
