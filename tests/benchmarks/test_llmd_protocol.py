"""What the public benchmark's runs say, and how it is scaled; that guidellm works here is tested in tests/clients."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.record import Record
from benchmarks.llmd_protocol.__main__ import MAX_LINE_TOKENS, Protocol, jobs_of, scale_of
from benchmarks.llmd_protocol.load import Chats, bursts, chats_of, questions
from benchmarks.llmd_protocol.report import Run, page, read
from benchmarks.llmd_protocol.systems import WINDOWS, Done, done_of, ends_of

ALONE = Chats(100, 10.0, 20.0, 2.0, 5.0, 4800)
BESIDE = Chats(100, 12.5, 40.0, 2.2, 5.0, 4800)
PROTOCOL = Protocol(Path("guidellm"))


def report(*phases: list[tuple[float, float]], failed: int = 0) -> dict[str, Any]:
    """As guidellm writes it: (TTFT, gap) of each call."""
    return {
        "benchmarks": [
            {
                "duration": 10.0,
                "requests": {
                    "successful": [
                        {"time_to_first_token_ms": ttft, "inter_token_latency_ms": gap, "output_tokens": 40}
                        for ttft, gap in calls
                    ],
                    "errored": [{"error": "refused"}] * failed,
                },
            }
            for calls in phases
        ]
    }


def test_all_phases_calls_are_one_sample() -> None:
    calm, burst = [(10.0, 1.0)] * 60, [(20.0, 3.0)] * 40
    assert chats_of(report(calm, burst)) == Chats(100, 10.0, 20.0, 3.0, 5.0, 4000)


def test_calls_that_fail_or_do_not_end_are_counted() -> None:
    found = report([(10.0, 1.0)], failed=2)
    found["benchmarks"][0]["requests"]["incomplete"] = [{}] * 3
    assert chats_of(found) == Chats(1, 10.0, 10.0, 1.0, 0.1, 40, 2, 3)


def test_a_run_without_an_answer_is_none() -> None:
    with pytest.raises(RuntimeError):
        chats_of(report([], [], failed=1))


def test_calm_and_burst_take_turns() -> None:
    assert bursts(15.0, 3) == [1.0, 15.0] * 3


def test_lines_are_as_long_as_the_jobs_should_take() -> None:
    scale = scale_of(PROTOCOL, capacity_per_s=20.0, be_tokens_per_s=1000.0)
    assert scale.rate == 10.0
    # 540 s of bursts, 3,000 lines
    assert scale.line_tokens == 180
    assert scale_of(PROTOCOL, 20.0, 1e6).line_tokens == MAX_LINE_TOKENS


def test_jobs_are_of_different_lines_with_the_mean_that_is_asked_for() -> None:
    jobs = jobs_of(200, 100)
    assert list(jobs) == list(WINDOWS) and all(len(each) == 200 for each in jobs.values())
    lengths = [line["max_tokens"] for each in jobs.values() for line in each]
    assert min(lengths) == 50 and max(lengths) == 150 and 98 < sum(lengths) / len(lengths) < 102
    prompts = {json.dumps(line["messages"]) for each in jobs.values() for line in each}
    assert len(prompts) == 600


def test_each_question_is_a_row_that_guidellm_reads() -> None:
    assert len(questions(30)) == 30
    assert {row.keys() == {"prompt", "output_tokens_count"} for row in questions(30)} == {True}


def batch(status: str, **times: int) -> dict[str, Any]:
    counts = {"total": 3, "completed": 2, "failed": 0}
    return {"status": status, "created_at": 100, "request_counts": counts} | times


def test_a_job_is_in_time_within_its_window() -> None:
    assert done_of("30m", batch("completed", completed_at=1900)).is_in_time
    assert not done_of("30m", batch("completed", completed_at=1901)).is_in_time
    assert done_of("30m", batch("expired", expired_at=1900)) == Done("30m", None, 3, 2)
    assert not done_of("30m", batch("expired")).is_in_time
    assert ends_of({"30m": 3, "2h": 4}) == {"30m": 3, "2h": 7}


def test_the_page_says_ratios_jobs_and_how_it_is_scaled() -> None:
    run = Run("aligned", ALONE, BESIDE, [Done("30m", 100.0, 3, 3), Done("2h", None, 3, 1)], 7, 900.0, 1000.0)
    assert run.ratios == pytest.approx((1.25, 2.0, 1.1))
    scale = {
        **{"command": "python -m benchmarks.llmd_protocol", "date": "2026-11-23", "processor": "A x 2"},
        **{"guidellm": "0.8.1", "num_at_once": 32, "capacity_per_s": 20.0, "burst_share": 0.5, "rate": 10.0},
        **{"calm_rate": 0.67, "phase_s": 90.0, "rounds": 3, "be_tokens_per_s": 1000.0, "windows": ["30m"]},
        **{"lines": 1000, "line_tokens": 144, "jobs_share": 1.0},
    }
    text = page(scale, [run])
    assert "| aligned | 1.25 | 2.00 | 1.10 | 1 of 2 | 7 | 900 | 1,000 |" in text
    assert "| aligned | 2h | 3 | 1 |  | no |" in text and "A burst has 50% of that, 10.00 a second" in text
    assert "22.30" in text
    tables = [block.splitlines() for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3
    assert all(len({row.count("|") for row in table}) == 1 for table in tables)


def test_what_was_measured_is_read_again(tmp_path: Path) -> None:
    run = Run("aligned", ALONE, BESIDE, [Done("30m", 100.0, 3, 3), Done("2h", None, 3, 1)], 7, 900.0, 1000.0)
    record = Record(tmp_path / "llmd_protocol.json", {"rate": 10.0})
    record.add(asdict(run))
    assert read(record.path.read_text()) == ({"rate": 10.0}, [run])
