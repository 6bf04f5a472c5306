"""The content of /metrics after known requests."""

from __future__ import annotations

import msgspec
import pytest

from alignedserve.gateway.telemetry.metrics import Histogram, Metrics, TierMetrics
from alignedserve.gateway.telemetry.telemetry import RequestStats
from alignedserve.protocol.messages import SCHEDULING_S, Cluster, InstanceStats, Moved, Rejected, Request
from alignedserve.sampling_params import SamplingParams
from alignedserve.types import InstanceId, RequestKey
from tests.gateway.observed import observed
from tests.gateway.scripted import ScriptedRouter, answer_of, process_status
from tests.gateway.served import play

NUM_TOKENS = len(answer_of("one two three"))


def test_a_request_is_counted_by_its_tokens_and_its_end() -> None:
    async def scenario() -> None:
        async with observed() as at:
            before = await at.metrics()
            assert before['generation_tokens_total{tier="rt"}'] == 0
            await at.chat()
            await at.chat(max_tokens=3)
            found = await at.metrics()
            assert found['generation_tokens_total{tier="rt"}'] == NUM_TOKENS + 3
            prompts = sum(len(submit.request.prompt) for submit in at.router.submitted)
            assert found['prompt_tokens_total{tier="rt"}'] == prompts
            assert found['request_success_total{finished_reason="stop",tier="rt"}'] == 1
            assert found['request_success_total{finished_reason="length",tier="rt"}'] == 1
            assert found['time_to_first_token_seconds_count{tier="rt"}'] == 2
            assert found['inter_token_latency_seconds_count{tier="rt"}'] == NUM_TOKENS - 1 + 2
            assert found['request_time_per_output_token_seconds_count{tier="rt"}'] == 2
            assert found['e2e_request_latency_seconds_count{tier="rt"}'] == 2
            assert found['request_generation_tokens_bucket{le="5.0",tier="rt"}'] == 1
            assert found['e2e_request_latency_seconds_count{tier="be"}'] == 0

    play(scenario)


def test_a_stop_string_is_a_success_and_a_client_that_leaves_is_none() -> None:
    async def scenario() -> None:
        async with observed() as at:
            at.router.allowed = NUM_TOKENS - 2
            await at.chat(stop=" two")
            async with at.http.stream(
                "POST",
                "/v1/completions",
                json={"model": "demo", "prompt": "How far?", "stream": True},
            ) as stream:
                assert await anext(stream.aiter_lines())
            await at.router.until(lambda: len(at.router.aborted) == 2)
            found = await at.metrics()
            assert found['request_success_total{finished_reason="stop",tier="rt"}'] == 1
            assert found['request_failure_total{finished_reason="abort",tier="rt"}'] == 1

    play(scenario)


def test_what_is_refused_has_no_latency() -> None:
    async def scenario() -> None:
        async with observed() as at:
            at.router.refuse = lambda submit: Rejected(submit.request.key, "full", "full")
            assert (await at.chat()).status_code == 503
            found = await at.metrics()
            assert found['request_failure_total{finished_reason="rejected",tier="rt"}'] == 1
            assert found['e2e_request_latency_seconds_count{tier="rt"}'] == 0

    play(scenario)


class KnowingRouter(ScriptedRouter):
    """Its island has a story."""

    def __init__(self) -> None:
        super().__init__()
        moved = [Moved("load", 4096, 0.5)]
        decode = InstanceStats(
            num_preemptions=3,
            num_evictions=2,
            num_batch_switches=5,
            num_batch_iterations=40,
            num_mixed_iterations=4,
            scheduling=[7] + [0] * (len(SCHEDULING_S) - 1) + [1],
            scheduling_s=2.5,
            min_length=10,
            max_length=50,
            moved=moved,
            num_computed_tokens=600,
            computing_s=1.5,
            num_failed_pulls=8,
            over_host=[InstanceId("prefill-0")],
            num_arriving_tokens=1000,
            num_not_copied_tokens=640,
            num_checked_blocks=5000,
            num_changed_blocks=11,
        )
        prefill = InstanceStats(
            num_spills=1, staged_bytes=8192, num_asked_tokens=900, num_found_tokens=300, num_handed_over=70
        )
        self.processes = [
            msgspec.structs.replace(
                process_status("kvpool"),
                stats=InstanceStats(num_asked_tokens=500, num_found_tokens=200),
                num_kept_blocks=3,
                num_shared_blocks=2,
                num_promised_blocks=2,
                promises={"kept": 7, "expired": 1},
            ),
            msgspec.structs.replace(process_status("prefill"), stats=prefill),
            msgspec.structs.replace(process_status("decode"), stats=decode),
        ]

    def cluster(self, ticket: int) -> Cluster:
        tiers = {"rt": {"running": 2, "queued": 1, "leaving": 1}, "be": {"pooled": 4, "prefilling": 1}}
        return Cluster(
            ticket, self.processes, {"running": 2}, tiers, {"decode": 6}, {"express": 9}, {"prefill": 4}
        )


def test_what_routers_know_is_shown_by_island_and_instance() -> None:
    async def scenario() -> None:
        async with observed(KnowingRouter()) as at:
            found = await at.metrics()
            assert found['num_requests_running{island="0",tier="rt"}'] == 2
            assert found['num_requests_waiting{island="0",tier="rt"}'] == 1
            assert found['num_requests_running{island="0",tier="be"}'] == 1
            assert found['num_requests_waiting{island="0",tier="be"}'] == 4
            assert found['recoveries_total{island="0",lost="decode"}'] == 6
            assert found['class_sharing_events_total{event="express",island="0"}'] == 9
            assert found['role_changes_total{island="0",to="prefill"}'] == 4
            decode = '{instance="decode-0",island="0",role="decode"}'
            assert found[f"num_preemptions_total{decode}"] == 3
            assert found[f"num_evictions_total{decode}"] == 2
            assert found[f"num_batch_switches_total{decode}"] == 5
            assert found[f"num_batch_iterations_total{decode}"] == 40
            assert found[f"num_mixed_iterations_total{decode}"] == 4
            within_1_s = '{instance="decode-0",island="0",le="1.0",role="decode"}'
            assert found[f"scheduling_time_seconds_bucket{within_1_s}"] == 7
            assert found[f"scheduling_time_seconds_count{decode}"] == 8
            assert found[f"scheduling_time_seconds_sum{decode}"] == 2.5
            assert found[f"computed_tokens_total{decode}"] == 600
            assert found[f"checked_blocks_total{decode}"] == 5000
            assert found[f"changed_blocks_total{decode}"] == 11
            assert found[f"computing_seconds_total{decode}"] == 1.5
            assert found[f"prefix_length_spread{decode}"] == 40
            assert (found[f"num_failed_pulls_total{decode}"], found[f"links_over_host{decode}"]) == (8, 1)
            assert found[f"kv_cache_usage_perc{decode}"] == pytest.approx(0.6)
            assert found[f"admitted_kv_tokens_total{decode}"] == 1000
            assert found[f"uncopied_kv_tokens_total{decode}"] == 640
            prefill = '{instance="prefill-0",island="0",role="prefill"}'
            assert found[f"num_spills_total{prefill}"] == 1
            assert found[f"staged_bytes{prefill}"] == 8192
            assert found[f"num_handed_over_total{prefill}"] == 70
            assert found[f"prefix_cache_queries_total{prefill}"] == 900
            assert found[f"prefix_cache_hits_total{prefill}"] == 300
            pool = 'instance="kvpool-0",island="0",role="kvpool"'
            assert found[f"pool_content_queries_total{{{pool}}}"] == 500
            assert found[f"pool_content_hits_total{{{pool}}}"] == 200
            assert found[f'pool_blocks{{{pool},state="shared"}}'] == 2
            assert found[f'pool_blocks{{{pool},state="kept"}}'] == 3
            assert found[f'pool_blocks{{{pool},state="promised"}}'] == 2
            for outcome, count in (("kept", 7), ("broken", 0), ("expired", 1), ("refused", 0)):
                labels = f'instance="kvpool-0",island="0",outcome="{outcome}",role="kvpool"'
                assert found[f"pool_promises_total{{{labels}}}"] == count
            load = '{instance="decode-0",island="0",role="decode",transfer="load"}'
            assert found[f"kv_transfer_bytes_total{load}"] == 4096
            assert found[f"kv_transfer_seconds_total{load}"] == 0.5

    play(scenario)


def test_without_a_router_the_gateways_own_metrics_stay() -> None:
    async def scenario() -> None:
        async with observed() as at:
            await at.chat()
            at.router.hub.close()
            await at.router.until(lambda: not list(at.router.hub))
            while 'num_requests_running{island="0",tier="rt"}' in (found := await at.metrics()):
                pass
            assert found['e2e_request_latency_seconds_count{tier="rt"}'] == 1

    play(scenario)


def stats(metrics: Metrics, now: float, **fields: float | str) -> RequestStats:
    request = Request(RequestKey(1), [1] * 8, SamplingParams(), seed=0, arrival_s=now)
    found = RequestStats(
        msgspec.structs.replace(request, **fields), None, metrics, lambda each: None, lambda each: None
    )
    found.opened()
    found.submitted(is_again=False)
    return found


def objectives(metrics: Metrics, tier: str = "rt") -> dict[tuple[str, bool], int]:
    return dict(metrics.of(tier).objectives)


def test_objectives_are_met_or_missed() -> None:
    metrics = Metrics()
    for gap_s in (0.5, 1.5):
        each = stats(metrics, now=100.0, ttft_s=2.0, tbt_s=1.0)
        each.tokens(1, 101.0 + gap_s)
        each.tokens(1, 101.0 + 2 * gap_s)
        each.ended("stop")
    # the first was due at 102, the second at 103: the second request's came at 102.5 and at 104
    assert objectives(metrics) == {("ttft", True): 1, ("ttft", False): 1, ("tbt", True): 1, ("tbt", False): 1}


def test_a_token_before_its_time_gives_the_next_one_more() -> None:
    metrics = Metrics()
    each = stats(metrics, now=100.0, ttft_s=2.0, tbt_s=1.0)
    each.tokens(1, 100.1)
    each.tokens(1, 102.9)
    each.ended("length")
    assert objectives(metrics)["tbt", True] == 1


def test_an_objective_is_missed_by_failing_and_not_by_the_client() -> None:
    metrics = Metrics()
    for reason in ("error", "abort", "rejected"):
        stats(metrics, now=100.0, ttft_s=2.0, tier="be", deadline_s=1e12).ended(reason)
    assert objectives(metrics, "be") == {("ttft", False): 1, ("deadline", False): 1}


def test_a_stream_without_tokens_is_a_silence_while_it_lasts_and_for_a_minute_after() -> None:
    metrics = Metrics()
    rt = metrics.of("rt")
    each = stats(metrics, now=100.0)
    assert rt.longest_silence_s(105.0) == 0.0, "before the first token"
    each.tokens(1, 106.0)
    each.tokens(1, 106.5)
    assert rt.longest_silence_s(107.0) == 0.5
    assert rt.longest_silence_s(114.5) == 8.0, "it lasts"
    each.tokens(1, 115.0)
    each.tokens(1, 115.25)
    assert rt.longest_silence_s(115.5) == 8.5
    each.ended("stop")
    assert rt.longest_silence_s(175.0) == 8.5
    assert rt.longest_silence_s(175.1) == 0.25
    assert rt.longest_silence_s(1000.0) == 0.0
    assert metrics.of("be").longest_silence_s(115.5) == 0.0


def test_a_token_that_is_due_and_missing_makes_an_open_request_late() -> None:
    metrics = Metrics()
    rt = metrics.of("rt")
    each = stats(metrics, now=100.0, ttft_s=2.0, tbt_s=1.0)
    assert rt.kept_so_far(101.9) == {}
    assert rt.kept_so_far(102.1) == {("ttft", False): 1}
    each.tokens(1, 102.5)
    assert rt.kept_so_far(103.5) == {("ttft", False): 1, ("tbt", True): 1}
    assert rt.kept_so_far(103.6) == {("ttft", False): 1, ("tbt", False): 1}, "the second was due at 103.5"
    assert objectives(metrics) == {}, "it has not ended"
    each.ended("stop")
    assert not rt.open and rt.kept_so_far(200.0) == {}
    assert stats(metrics, now=100.0).keeps("tbt", 999.0) is None, "it has no objective"


def test_scrapes_within_a_second_read_open_requests_once() -> None:
    class Read:
        num_calls = 0

        def silence_s(self, now: float) -> float:
            self.num_calls += 1
            return now - 100.0

        def keeps(self, slo: str, now: float) -> bool | None:
            self.num_calls += 1
            return True

    rt, each = TierMetrics(), Read()
    rt.open.add(each)
    first = rt.open_now(101.0)
    assert (first.longest_silence_s, first.kept_so_far["ttft", True]) == (1.0, 1) and each.num_calls == 3
    assert rt.open_now(101.9) is first and each.num_calls == 3
    assert rt.open_now(102.0).longest_silence_s == 2.0 and each.num_calls == 6


def test_an_open_request_and_its_silence_are_in_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("alignedserve.gateway.telemetry.metrics.SCAN_S", 0.0)

    async def scenario() -> None:
        async with observed() as at:
            at.router.allowed = NUM_TOKENS - 2
            slo = {"ttft_ms": 1, "tbt_ms": 1}
            body = {"model": "demo", "prompt": "How far?", "stream": True, "slo": slo}
            late = 'open_request_slo{met="false",slo="tbt",tier="rt"}'
            silence = 'longest_silence_seconds{tier="rt"}'
            async with at.http.stream("POST", "/v1/completions", json=body) as stream:
                lines = stream.aiter_lines()
                assert await anext(lines)
                while not (found := await at.metrics())[late]:
                    pass
                assert found[late] == 1 and found['open_request_slo{met="true",slo="tbt",tier="rt"}'] == 0
                assert 0 < found[silence] < (await at.metrics())[silence]
            await at.router.until(lambda: bool(at.router.aborted))
            assert (await at.metrics())[late] == 0

    play(scenario)


def test_the_time_in_the_queue_is_the_routers_word() -> None:
    metrics = Metrics()
    each = stats(metrics, now=100.0)
    each.submitted_s = 100.5
    each.timeline = [("queued", 0.0), ("reserving", 1.0), ("prefilling", 2.0), ("pooled", 3.0)]
    each.tokens(1, 103.25)
    each.ended("stop")
    rt = metrics.of("rt")
    assert (rt.queue_time.sum, rt.prefill_time.sum) == (2.5, 0.75)


def test_a_histogram_counts_a_value_on_a_bound_below_it() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 3), ("+Inf", 4)]
    assert (histogram.count, histogram.sum) == (4, 12.0)


def test_a_clock_that_is_set_back_takes_nothing_off_the_turnaround_of_jobs() -> None:
    """A histogram's sum that falls is a counter that was started anew, to Prometheus."""
    metrics = Metrics()
    metrics.job_was_over(created_at=7200, over_at=7260, window_s=3600)
    metrics.job_was_over(created_at=7200, over_at=100, window_s=3600)
    (found,) = [each for each in metrics.turnarounds.values() if each.count]
    assert (found.count, found.sum) == (2, 60.0)
