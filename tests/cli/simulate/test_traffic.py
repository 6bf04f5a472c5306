from __future__ import annotations

import json
from pathlib import Path

import pytest

from alignedserve.cli.simulate.config import SimConfig
from alignedserve.cli.simulate.traffic import make_traffic

TIMES_S = [0, 10, 11, 13, 17]


def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    lines = [
        {"arrival_s": 100 + time_s, "prompt_len": 10 + k, "output_len": 2} for k, time_s in enumerate(TIMES_S)
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    return str(path)


def test_a_trace_begins_at_any_of_its_requests(tmp_path: Path) -> None:
    found = make_traffic(SimConfig(trace=trace(tmp_path), trace_start=1, num_prompts=3))
    assert [(each.time_s, each.lengths.prompt) for each in found] == [(0, 11), (1, 12), (3, 13)]
    # It is played at the rate that is asked for, and gaps stay in proportion.
    found = make_traffic(SimConfig(trace=trace(tmp_path), trace_start=1, num_prompts=3, request_rate=4.0))
    assert [each.time_s for each in found] == pytest.approx([0, 1 / 6, 1 / 2])
    assert len(make_traffic(SimConfig(trace=trace(tmp_path), trace_start=3))) == 2


def test_a_start_beyond_the_trace_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"trace_start=5: .*trace.jsonl holds 5 requests, counted from 0"):
        make_traffic(SimConfig(trace=trace(tmp_path), trace_start=5))
    with pytest.raises(ValueError, match="trace_start=1: needs a trace"):
        SimConfig(trace_start=1)
    with pytest.raises(ValueError, match="trace_start=-1: must be from 0"):
        SimConfig(trace="any", trace_start=-1)
