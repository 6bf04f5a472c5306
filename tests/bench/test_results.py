"""Figures of outcomes that are known, and how they are shown."""

from __future__ import annotations

import json
import math
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from alignedserve.bench.client import RequestOutcome
from alignedserve.bench.config import BenchConfig
from alignedserve.bench.plot import attainment_over_time, draw
from alignedserve.bench.report import result_json, save, table
from alignedserve.bench.results import Results, evaluate, times_of

# five tokens in four pieces of text: the server counts, the pieces give the gaps
SLOW = RequestOutcome("rt", 1.0, 1.0, [1.5, 1.6, 1.7, 1.9], "slow", 10, 5, None)
QUICK = RequestOutcome("rt", 0.0, 0.0, [0.1, 0.15, 0.2], "quick", 20, 3, None, is_right=True)
BATCH = RequestOutcome("be", 0.0, 0.5, [9.5], "batch", 30, 1, None, is_right=False)
LOST = RequestOutcome("rt", 2.0, 2.0, [], "", 40, 0, "HTTP 503")
OUTCOMES = [SLOW, QUICK, BATCH, LOST]
OBJECTIVES = {"ttft": 200.0, "tpot": 50.0}


def results(outcomes: list[RequestOutcome] = OUTCOMES, objectives: dict[str, float] = OBJECTIVES) -> Results:
    return evaluate(outcomes, 10.0, objectives, [50.0, 99.0])


def test_times_of_a_request() -> None:
    found = times_of(SLOW)
    assert found.ttft == 0.5 and found.e2el == pytest.approx(0.9)
    assert found.tpot == pytest.approx(0.4 / 4)
    assert found.itls == pytest.approx((0.1, 0.1, 0.2))


def test_totals() -> None:
    found = results()
    assert (found.completed, found.failed) == (3, 1)
    assert (found.total_input_tokens, found.total_output_tokens) == (60, 9)
    assert (found.request_throughput, found.output_throughput, found.total_token_throughput) == (
        0.3,
        0.9,
        6.9,
    )
    # all of SLOW's pieces, from 1.5 s on; QUICK's are in the second before
    assert found.max_output_tokens_per_s == 4
    assert found.max_concurrent_requests == 2
    assert found.correct == 0.5


def test_summaries_leave_out_what_a_request_does_not_have() -> None:
    found = results().summaries
    assert found["ttft"].mean == pytest.approx((500 + 100 + 9000) / 3)
    assert found["ttft"].median == pytest.approx(500)
    assert found["tpot"].mean == pytest.approx((100 + 50) / 2)
    assert found["itl"].percentiles[0] == pytest.approx((50.0, 100.0))


def test_goodput_counts_who_kept_all_objectives_and_best_effort_that_was_answered() -> None:
    found = results()
    assert found.request_goodput == 0.2
    assert found.attainment == {"rt": pytest.approx(1 / 3), "be": 1.0}
    assert results(objectives={}).request_goodput is None


def test_the_peak_is_of_those_in_the_same_second() -> None:
    outcomes = [RequestOutcome("rt", at, at, [at + 0.25], "x", 1, 1, None) for at in (5.0, 5.5, 6.5)]
    assert results(outcomes).max_concurrent_requests == 2
    outcomes[1].times_s = [6.5]
    assert results(outcomes).max_concurrent_requests == 2
    outcomes[0].times_s = [7.5]
    assert results(outcomes).max_concurrent_requests == 3


def test_nothing_at_all_is_zeros() -> None:
    found = results([LOST])
    assert (found.completed, found.output_throughput, found.summaries["ttft"].mean) == (0, 0.0, 0.0)


def config(**options: Any) -> BenchConfig:
    return BenchConfig(**{"goodput": "ttft:200 tpot:50", "metric_percentiles": "50,99"} | options)


def test_the_table_is_laid_out_as_vllms() -> None:
    lines = table(config(request_rate=4.0), OUTCOMES, results()).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1] == "Successful requests:                     3         "
    assert "Request rate configured (RPS):           4.00      " in lines
    assert "Request goodput (req/s):                 0.20      " in lines
    assert "---------------Time to First Token----------------" in lines
    assert "Mean TTFT (ms):                          3200.00   " in lines
    assert "P50 TTFT (ms):                           500.00    " in lines
    assert "Real-time SLO attainment (%):            33.33     " in lines
    assert "Correct answers (%):                     50.00     " in lines
    assert lines[-1] == "=" * 50


# what vLLM writes for a run with a goodput, without what only its own options bring
VLLM_FIELDS = """date endpoint_type backend label model_id tokenizer_id num_prompts request_rate burstiness
max_concurrency duration completed failed total_input_tokens total_output_tokens request_throughput request_goodput
output_throughput total_token_throughput max_output_tokens_per_s max_concurrent_requests mean_ttft_ms median_ttft_ms
std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms mean_itl_ms median_itl_ms std_itl_ms
p99_itl_ms"""
VLLM_DETAILS = "input_lens output_lens ttfts itls latencies start_times queue_times generated_texts errors"


def test_the_file_has_vllms_fields(tmp_path: Path) -> None:
    settings = config(save_detailed=True, result_dir=str(tmp_path), be_share=0.25)
    now = datetime(2026, 1, 2, 3, 4, 5)
    path = save(settings, result_json(settings, "org/model", OUTCOMES, results(), now))
    assert path.name == "openai-infqps-model-20260102-030405.json"
    found = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert not set(f"{VLLM_FIELDS} {VLLM_DETAILS}".split()) - found.keys()
    assert found["errors"] == ["", "", "", "HTTP 503"] and found["tiers"][2] == "be"
    assert found["queue_times"] == [0.0, 0.0, 0.5, 0.0]
    assert (found["rt"]["completed"], found["be"]["median_ttft_ms"]) == (2, 9000.0)
    save(settings, found | {"mean_ttft_ms": math.inf})
    assert json.loads(path.read_text(), parse_constant=pytest.fail)["mean_ttft_ms"] is None
    brief = result_json(config(), "model", OUTCOMES, results(), now)
    assert "itls" not in brief and "rt" not in brief


def test_attainment_over_time_counts_by_when_requests_were_due() -> None:
    # ten stretches of 0.3 s
    found = attainment_over_time(67 * OUTCOMES, OBJECTIVES, 3.0, "rt")
    assert [at_s for at_s, _ in found] == pytest.approx([0.15, 1.05, 1.95])
    assert [share for _, share in found] == [1.0, 0.0, 0.0]
    # too few to show a course
    [(at_s, share)] = attainment_over_time(OUTCOMES, OBJECTIVES, 3.0, "rt")
    assert (at_s, share) == pytest.approx((1.5, 1 / 3))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "run.png"
    draw(OUTCOMES, OBJECTIVES, 10.0, "this run", path)
    assert path.read_bytes().startswith(b"\x89PNG") and path.stat().st_size > 10_000
    draw([LOST], {}, 10.0, "this run", path)
