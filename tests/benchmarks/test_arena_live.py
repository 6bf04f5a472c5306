"""Scenarios are drawn from numbers, both sides are judged by one rule, and the page shows both."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace as with_fields

from alignedserve import demo
from alignedserve.protocol.messages import DecodeReport, NewTokens, PrefillReport, Submit, Tokens
from alignedserve.router.events import Received, Send
from alignedserve.sim.model import make_request
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.types import GATEWAY, RequestKey
from benchmarks.arena.fitting import Layout
from benchmarks.arena_live.__main__ import main
from benchmarks.arena_live.page import line, page
from benchmarks.arena_live.played import overhead_of
from benchmarks.arena_live.scenes import LEAST, LONGEST_S, count_left_out, draw, requests_of
from benchmarks.arena_live.scores import Score, is_kept, score
from benchmarks.sim_vs_live.figures import Door
from benchmarks.sim_vs_live.requests import MAX_TOKENS

TOKENIZER = Tokenizer.from_directory(demo.MODEL_DIR)
COST = with_fields(load_cost_model("opt-13b/a100-80gb"), num_kv_tokens=1 << 14)


def test_a_number_draws_a_scenario_and_its_requests() -> None:
    scenes = [draw(number) for number in range(40)]
    assert scenes == [draw(number) for number in range(40)]
    assert {scene.best_effort for scene in scenes} == {"none", "share", "backlog"}
    assert {scene.layout for scene in scenes} >= {Layout(0, 0, 1), Layout(0, 0, 2), Layout(1, 1, 0)}
    for scene in scenes[:8]:
        asked = requests_of(scene, COST, 1.2, 5.0, TOKENIZER)
        assert asked == requests_of(scene, COST, 1.2, 5.0, TOKENIZER)
        assert asked[0].due_s == 0.0 and all(a.due_s <= b.due_s for a, b in pairwise(asked))
        for each in asked:
            assert each.max_tokens and each.prompt_len + each.max_tokens <= MAX_TOKENS
            assert (each.tbt_s is None) == (each.tier == "be")


def test_requests_come_at_the_load() -> None:
    scene = replace(draw(0), load=0.5, best_effort="none", be_share=0.0, spread=1.0, burstiness=1.0)
    asked = requests_of(scene, COST, 1.0, 60.0, TOKENIZER)
    rate = (len(asked) - 1) / asked[-1].due_s
    assert {each.tier for each in asked} == {"rt"}
    slower = requests_of(scene, COST, 2.0, 120.0, TOKENIZER)
    assert (len(slower) - 1) / slower[-1].due_s == pytest.approx(rate / 2, rel=0.15)
    assert slower[0].tbt_s == pytest.approx(2 * (asked[0].tbt_s or 0.0), rel=0.02)


def test_a_slow_machine_has_fewer_requests() -> None:
    scene = draw(0)
    assert len(requests_of(scene, COST, 1.0, 1.0, TOKENIZER)) >= LEAST
    asked = requests_of(scene, COST, 1000.0, 1.0, TOKENIZER)
    assert 1 <= len(asked) < LEAST and asked[-1].due_s <= LONGEST_S
    # More seconds were asked for.
    longer = requests_of(scene, COST, 1000.0, 3 * LONGEST_S, TOKENIZER)
    assert LONGEST_S < longer[-1].due_s <= 3 * LONGEST_S


def test_real_time_that_a_slow_machine_leaves_out_is_counted() -> None:
    scene = replace(draw(0), load=0.5, best_effort="none", be_share=0.0)
    for each in (scene, replace(scene, best_effort="backlog")):
        assert count_left_out(each, COST, 1.0, 1.0, TOKENIZER) == 0
        asked = requests_of(each, COST, 1000.0, 1.0, TOKENIZER)
        num_rt = sum(request.tier == "rt" for request in asked)
        assert count_left_out(each, COST, 1000.0, 1.0, TOKENIZER) == LEAST - num_rt > 0


def test_a_backlog_is_there_from_the_beginning_and_takes_what_real_time_leaves() -> None:
    scene = replace(draw(0), load=0.5, best_effort="backlog", be_share=0.0)
    asked = requests_of(scene, COST, 1.0, 20.0, TOKENIZER)
    be = [each for each in asked if each.tier == "be"]
    assert {each.due_s for each in be} == {0.0}
    assert len(be) == pytest.approx(len(asked) / 2, abs=1)


def door_of(*times_s: tuple[int, str, float | None, float, list[float]]) -> Door:
    """Each request's key, tier, objective, arrival and times of its tokens."""
    door = Door()
    for key, tier, tbt_s, arrived_s, _ in sorted(times_s, key=lambda each: each[3]):
        request = make_request(key, 10, 9, arrival_s=0.0, max_tokens=9, tier=tier, tbt_s=tbt_s)
        door(arrived_s, Received(GATEWAY, Submit(request)), [])
    for key, *_, tokens_s in times_s:
        for place, time_s in enumerate(tokens_s):
            news = Tokens([NewTokens(RequestKey(key), place, [7])])
            door(time_s, Received(GATEWAY, Submit(door.requests[RequestKey(key)])), [Send(GATEWAY, news)])
    return door


def test_real_time_is_in_time_if_each_token_is() -> None:
    door = door_of(
        (1, "rt", 0.1, 1.0, [1.5, 2.05, 2.2]),
        (2, "rt", 0.1, 1.0, [1.5, 2.15, 2.16]),
        (3, "rt", 0.1, 1.0, [2.1, 2.1, 2.1]),
        (4, "be", None, 1.1, [1.2, 1.9, 2.4]),
    )
    assert [is_kept(door, RequestKey(key), 1.0) for key in (1, 2, 3)] == [True, False, False]
    found = score(door, 4, 1.0)
    assert found.in_time == pytest.approx(1 / 3)
    # Up to the last token of real time
    assert found.be_tokens_per_s == pytest.approx(2 / 1.2)
    assert found.ttft_p50_s == pytest.approx(0.5) and found.gap_p99_s == pytest.approx(0.65, rel=0.05)


def test_what_prefill_instances_take_beyond_the_pace_is_told_to_the_simulator() -> None:
    door = Door()
    for place in range(8):
        request = make_request(place, 10, 1, arrival_s=0.0, max_tokens=1)
        door(place + 0.0, Received(GATEWAY, Submit(request)), [])
        told = Tokens([NewTokens(RequestKey(place), 0, [7])])
        report = DecodeReport([NewTokens(RequestKey(place), 0, [7])], [], [], [], 0, 1, 1, 1, 0.01, pace=2.0)
        door(place + 0.6, Received(GATEWAY, with_fields(report, num_computed=1)), [Send(GATEWAY, told)])
    took_s = 3 * COST.iteration([(0, 100)], [])
    door(7.7, Received(GATEWAY, PrefillReport([], [], [], [], 0, took_s, num_computed=100)), [])
    found = overhead_of(door, COST, 8.0)
    assert found.pace == 2.0 and found.overruns_of_chunks == pytest.approx((1.5,))
    assert overhead_of(door, COST, 7.65).overruns_of_chunks == ()


def test_the_page_has_both_sides() -> None:
    live = Score(0.9, 0.2, 0.4, 0.05, 0.1, 40.0)
    simulated = replace(live, in_time=0.95, ttft_p50_s=0.1)
    scene = asdict(draw(3)) | {"layout": "1 + 1"}
    row = {
        **{"policy": "aligned", "scene": scene, "load_average": 0.1, "live": asdict(live)},
        **{"simulated": asdict(simulated), "num_requests": 60, "pace": 1.3, "num_left_out": 7},
    }
    failed = {"policy": "fcfs", "scene": scene, "load_average": 0.1, "error": "no answer:\nit died"}
    record = {
        **{"command": "this", "date": "today", "processor": "a processor", "num_cpus": 2},
        "rows": [row, failed],
    }
    text = "\n".join(page(json.loads(json.dumps(record))))
    assert "apart by\n  5.0 points at the median" in text and "live 90.0 % on average" in text
    assert "TTFT p50, simulated to live: 0.50 at the median" in text
    assert "| 60 | 1.30 | 90, 95 | 200, 100 |" in text
    assert "Not measured: scenario 3, fcfs: it died" in text
    assert "Scenario 3, aligned: 7 requests of real time left out" in text
    assert "in time 90 | 95 %" in line(row) and "FAILED it died" in line(failed)


@pytest.mark.slow
@pytest.mark.drawn(one_in=8)
def test_a_scenario_is_played_live_and_in_simulation(tmp_path: Path) -> None:
    main(["--count", "1", "--seconds", "1", "--profile-s", "1", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "arena_live.json").read_text())["rows"]
    assert "error" not in row, row["error"]
    assert row["num_requests"] >= 1 and row["num_requests"] + row["num_left_out"] >= 30 and row["pace"] > 0
    assert "| 0 | `aligned` |" in (tmp_path / "arena_live.md").read_text()
