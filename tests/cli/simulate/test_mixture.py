"""Real time and best effort in one simulation: known lengths, pauses and worth, exactly."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from statistics import fmean, median

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from alignedserve.cli.simulate.mixture import is_kept, mixture, real_time
from alignedserve.kv.span import KvSpan
from alignedserve.protocol.messages import DecodeReport, Evict, Failed, NewTokens, PrefillReport
from alignedserve.router.events import Received, Send
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.foresight import Roughly, nothing, oracle, sigma_for
from alignedserve.sim.gateway import Stream
from alignedserve.sim.model import make_request, num_output_tokens
from alignedserve.sim.pauses import Pauses
from alignedserve.sim.report import Objectives
from alignedserve.sim.scenario import Ran, Scenario
from alignedserve.sim.trace import Arrival, Lengths, gamma_arrivals, mixed, poisson_arrivals, rate_of
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.types import InstanceId, RequestKey

COST = replace(load_cost_model("opt-13b/a100-80gb"), num_kv_tokens=6_000)
DECODE, PREFILL = InstanceId("decode-0"), InstanceId("prefill-0")
A, B, C = RequestKey(1), RequestKey(2), RequestKey(3)


# ---- what is known of lengths ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("max_tokens", "prompt_len", "length"), [(None, 10, 30), (7, 10, 7), (None, 90, 10), (30, 90, 10)]
)
def test_an_answer_ends_by_itself_or_at_its_limit_or_the_models(
    max_tokens: int | None, prompt_len: int, length: int
) -> None:
    request = make_request(1, prompt_len, num_output_tokens=30, arrival_s=0.0, max_tokens=max_tokens)
    assert num_output_tokens(request, max_model_len=100) == length
    assert oracle(100)(request) == length
    assert nothing(request) == 0


@pytest.mark.slow
@pytest.mark.parametrize("relative_error", [0.1, 0.267, 0.478])
def test_a_rough_guess_is_as_wrong_as_it_should_be_on_average_and_right_at_the_median(
    relative_error: float,
) -> None:
    roughly = Roughly(max_model_len=1 << 20, relative_error=relative_error)
    requests = [make_request(key, 10, num_output_tokens=5000, arrival_s=0.0) for key in range(20_000)]
    guesses = [roughly(request) / 5000 for request in requests]
    assert fmean(abs(guess - 1) for guess in guesses) == pytest.approx(relative_error, rel=0.05)
    assert median(guesses) == pytest.approx(1.0, rel=0.03)
    assert [roughly(request) for request in requests[:50]] == [roughly(request) for request in requests[:50]]


def test_no_error_is_the_truth_and_nonsense_is_refused() -> None:
    request = make_request(1, 10, num_output_tokens=333, arrival_s=0.0)
    assert Roughly(1000, relative_error=0.0)(request) == 333
    with pytest.raises(ValueError, match="relative_error=-1"):
        sigma_for(-1)


# ---- arrivals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cv", [0.5, 1.0, 5.0])
def test_gaps_of_gamma_arrivals_deviate_as_asked_for(cv: float) -> None:
    workload = gamma_arrivals([Lengths(5, 5)] * 60_000, rate=8.0, cv=cv, seed=1)
    gaps = [later.time_s - sooner.time_s for sooner, later in pairwise(workload)]
    mean = fmean(gaps)
    deviation = fmean((gap - mean) ** 2 for gap in gaps) ** 0.5
    assert rate_of(workload) == pytest.approx(8.0, rel=0.1)
    assert deviation / mean == pytest.approx(cv, rel=0.1)


def test_poisson_is_gamma_of_one() -> None:
    lengths = [Lengths(5, 5)] * 10
    assert gamma_arrivals(lengths, 2.0, 1.0, seed=3) == poisson_arrivals(lengths, 2.0, seed=3)
    with pytest.raises(ValueError, match="cv=0"):
        gamma_arrivals(lengths, 2.0, 0.0, seed=3)


def test_workloads_are_mixed_in_order_of_time() -> None:
    one, other = (
        [Arrival(1.0, Lengths(1, 1)), Arrival(3.0, Lengths(1, 1))],
        [Arrival(2.0, Lengths(2, 2), "be")],
    )
    assert [(each.time_s, each.tier) for each in mixed(one, other)] == [(1.0, "rt"), (2.0, "be"), (3.0, "rt")]


# ---- pauses ---------------------------------------------------------------------------------------------------------


def decoded(
    pauses: Pauses,
    ran: list[RequestKey],
    admitted: tuple[RequestKey, ...] = (),
    evicted: tuple[tuple[RequestKey, int], ...] = (),
    wants_evicted: tuple[RequestKey, ...] = (),
    ended: tuple[RequestKey, ...] = (),
    sends: tuple[Send, ...] = (),
) -> None:
    news = [NewTokens(key, 0, [1], finish_reason="stop" if key in ended else None) for key in ran]
    report = DecodeReport(
        news,
        [*admitted],
        [*wants_evicted],
        [*evicted],
        num_free_blocks=0,
        num_running=3,
        max_length=0,
        sum_lengths=0,
    )
    pauses(0.0, Received(DECODE, report), list(sends))


def test_who_is_left_out_of_iterations_sat_out_once_a_spell() -> None:
    pauses = Pauses()
    decoded(pauses, [], admitted=(A, B))
    for ran in ([A, B], [A], [A], [A, B], [A]):
        decoded(pauses, ran)
    assert pauses.sat_out == [B, B]
    assert pauses.count == 2


def test_who_has_ended_or_waits_for_an_eviction_does_not_sit_out() -> None:
    pauses = Pauses()
    decoded(pauses, [], admitted=(A, B, C))
    decoded(pauses, [A, B, C], ended=(B,), wants_evicted=(C,))
    decoded(pauses, [A])
    assert pauses.count == 0


def test_an_eviction_counts_what_was_saved_and_what_has_to_come_back() -> None:
    pauses = Pauses()
    decoded(pauses, [], admitted=(A, B))
    decoded(pauses, [A, B], wants_evicted=(B,), sends=(Send(DECODE, Evict(B, [], num_saved=32)),))
    # in the iteration that had begun
    decoded(pauses, [A, B])
    decoded(pauses, [A], evicted=((B, 50),))
    decoded(pauses, [A])
    assert (pauses.evicted, pauses.sat_out) == ([B], [])
    assert (pauses.num_saved_tokens, pauses.num_fetched_tokens) == (18, 50)


def test_of_what_is_behind_a_window_nothing_is_moved() -> None:
    pauses = Pauses(KvSpan(16, window=100))
    decoded(pauses, [], admitted=(A, B), sends=(Send(DECODE, Evict(B, [], num_saved=32)),))
    decoded(pauses, [A, B], evicted=((A, 90), (B, 250)))
    # The window of token 250 begins at 151, and what is needed with the tile before it, at 128.
    assert (pauses.num_saved_tokens, pauses.num_fetched_tokens) == (90 + 122, 90 + 122)


def test_in_layers_that_attend_to_all_tokens_everything_is_moved() -> None:
    pauses = Pauses(KvSpan(16, window=100, num_full_groups=1, num_sliding_groups=3))
    decoded(pauses, [], admitted=(A, B), sends=(Send(DECODE, Evict(B, [], num_saved=32)),))
    decoded(pauses, [A, B], evicted=((B, 250),))
    assert pauses.num_saved_tokens == (1 * (250 - 32) + 3 * 122) / 4
    assert pauses.num_fetched_tokens == (1 * 250 + 3 * 122) / 4


def test_after_an_eviction_that_failed_it_can_sit_out_again() -> None:
    pauses = Pauses()
    decoded(pauses, [], admitted=(A, B), sends=(Send(DECODE, Evict(B, [], num_saved=0)),))
    decoded(pauses, [A])
    assert pauses.count == 0
    pauses(0.0, Received(DECODE, Failed(B, "evict", "no room")), [])
    decoded(pauses, [A, B])
    decoded(pauses, [A])
    assert pauses.sat_out == [B]


def test_a_prompt_that_waits_between_chunks_was_interrupted() -> None:
    pauses = Pauses()

    def computed(progress: list[tuple[RequestKey, int, int]], done: list[RequestKey]) -> None:
        news = [NewTokens(key, 0, [1]) for key in done]
        pauses(0.0, Received(PREFILL, PrefillReport(news, [], [], progress, 0)), [])

    computed([(A, 16, 0)], [])
    computed([], [])  # a copy has ended, and nothing was computed
    computed([(B, 16, 0)], [])
    computed([], [B])
    computed([(A, 32, 0)], [])
    computed([], [A])
    computed([], [C])
    assert pauses.interrupted == [A]


# ---- what it was worth ----------------------------------------------------------------------------------------------


def stream(times_s: list[float], outcome: str | None = "stop", tbt_s: float | None = 0.1) -> Stream:
    request = make_request(1, 10, len(times_s), arrival_s=1.0, ttft_s=0.5, tbt_s=tbt_s)
    return Stream(request, [0] * len(times_s), times_s, outcome, times_s[-1] if times_s else 0.0)


@pytest.mark.parametrize(
    ("times_s", "outcome", "kept"),
    [
        ([1.5, 1.6, 1.7], "stop", True),
        # ahead: a late token that is not later than its due time
        ([1.1, 1.15, 1.7], "stop", True),
        ([1.1, 1.15, 1.71], "stop", False),
        ([1.51, 1.6], "stop", False),
        ([1.5, 1.6], None, False),
        ([], None, False),
    ],
)
def test_real_time_is_kept_when_every_token_comes_by_its_due_time(
    times_s: list[float], outcome: str | None, kept: bool
) -> None:
    # a hair, for the rounding of sums
    assert is_kept(stream([time_s - 1e-9 for time_s in times_s], outcome)) is kept


def test_who_has_no_token_yet_counts_with_the_time_waited() -> None:
    told = real_time([stream([1.2, 1.3, 1.5]), stream([], None)], begin_s=0.0, end_s=5.0)
    assert (told.num_requests, told.attainment) == (2, 0.5)
    assert told.ttft_s.p99 == pytest.approx(4.0)
    assert told.gap_s.p99 == pytest.approx(0.2)
    assert told.tokens_per_s == pytest.approx(3 / 5)


def ran(policy: str = "aligned", num_be: int = 40, window_s: float | None = None) -> Ran:
    """Memory for a few of them at a time, so that some have to go."""
    dice = Random(1)
    be = [
        Arrival(0.0, Lengths(dice.randint(100, 600), dice.randint(50, 300)), "be", window_s)
        for _ in range(num_be)
    ]
    rt = poisson_arrivals([Lengths(60, 30)] * 30, rate=2.0, seed=2)
    scenario = Scenario(
        COST,
        scheduling=SchedulingConfig(policy),
        max_num_seqs=16,
        max_model_len=1024,
        slo=Objectives(0.5, 0.1),
        foresee=oracle(1024),
    )
    return scenario.simulate(mixed(be, rt))


@pytest.mark.parametrize("policy", ["aligned", "fcfs"])
def test_nothing_is_computed_twice(policy: str) -> None:
    done = ran(policy)
    found = mixture(done, 0.0, 10.0)
    assert all(each.is_complete for each in done.streams)
    assert found.num_evicted > 0
    assert found.moved_bytes > 0
    assert found.num_computed == found.num_needed == sum(done.computed.values())


@pytest.mark.slow
def test_tokens_in_windows_add_up() -> None:
    done = ran()
    end_s = max(each.ended_s for each in done.streams) + 1
    middle_s = end_s / 3
    parts = [mixture(done, 0.0, middle_s), mixture(done, middle_s, end_s)]
    be = [each for each in done.streams if each.request.tier == "be"]
    num_tokens = parts[0].be.tokens_per_s * middle_s + parts[1].be.tokens_per_s * (end_s - middle_s)
    assert num_tokens == pytest.approx(sum(len(each.tokens) for each in be))
    assert sum(part.rt.num_requests for part in parts) == 30
    assert all(0 < part.busy <= 1 for part in parts)


@pytest.mark.slow
def test_jobs_are_kept_up_to_their_windows() -> None:
    assert mixture(ran(window_s=1e-3), 0.0, 10.0).be.jobs_kept == 0.0
    assert mixture(ran(window_s=1e6), 0.0, 10.0).be.jobs_kept == 1.0
    assert mixture(ran(), 0.0, 10.0).be.jobs_kept is None


@settings(max_examples=15, deadline=None)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 500), st.integers(1, 200), st.booleans()), min_size=1, max_size=25
    ),
    policy=st.sampled_from(["aligned", "fcfs"]),
)
def test_whatever_the_mixture_what_is_computed_is_what_is_needed(
    lengths: list[tuple[int, int, bool]], policy: str
) -> None:
    workload = [
        Arrival(0.01 * index, Lengths(prompt, output), "rt" if is_rt else "be")
        for index, (prompt, output, is_rt) in enumerate(lengths)
    ]
    cost = replace(COST, num_kv_tokens=1_024)
    done = Scenario(cost, max_num_seqs=8, max_model_len=1024, scheduling=SchedulingConfig(policy)).simulate(
        workload
    )
    found = mixture(done, 0.0, 1.0)
    assert found.num_computed == found.num_needed == sum(done.computed.values())
