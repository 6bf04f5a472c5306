"""The arena: scenarios come from numbers alone, and each is a command."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from alignedserve.cli.simulate.compare import MAX_MODEL_LEN
from alignedserve.cli.simulate.config import SimConfig
from alignedserve.cli.simulate.traffic import make_traffic
from alignedserve.launch.settings import taken
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import POLICIES, make_policy
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.arena import __main__ as arena
from benchmarks.arena.configs import config_of
from benchmarks.arena.fitting import Fitting
from benchmarks.arena.regimes import (
    DIMENSIONS,
    dice_of,
    draw,
    numbers_of,
    value_of,
    values_of,
    wanted_regime,
)
from tests.benchmarks.arena_scores import options_of

NUM_DRAWN, NUM_OF_TRACES = 150, 150
# Machine, layout, load and objectives of the first scenarios.
DRAWN = [
    ("opt-13b/a100-80gb", (0, 0, 4), 0.5, "none"),
    ("qwen3-30b-a3b/h200", (1, 3, 0), 1.2, "infeasible"),
    ("opt-66b/a100-80gb-tp4", (4, 4, 0), 0.05, "tight"),
]
FIRST_FIFTY = "506686e381b6baa4cd5d6c463f7f2dd61c5f7b407f53042fbd2621b3a6f151f1"


# ---- draws ----------------------------------------------------------------------------------------------------------


def test_a_number_always_means_the_same_scenario() -> None:
    """Results of one day are compared with those of another: these were drawn when the arena was made."""
    again = [config_of(dice_of(number, ())) for number in range(20)]
    assert [replace(config, policy=tuple(POLICIES)) for config in again] == [
        draw(number).config for number in range(20)
    ]
    assert len({draw(number).config for number in range(100)}) == 100
    found = [(each.machine, each.layout, each.load, each.objectives) for each in map(draw, range(3))]
    assert found == DRAWN


def test_the_first_fifty_scenarios_are_what_they_were() -> None:
    """Whoever changes what numbers mean changes this digest on purpose, and makes earlier results incomparable."""
    commands = "\n".join(draw(number).command(["aligned"]) for number in range(50))
    assert sha256(commands.encode()).hexdigest() == FIRST_FIFTY


def test_every_value_of_every_dimension_is_drawn() -> None:
    drawn = [dice_of(number, ()) for number in range(400)]
    for dimension in DIMENSIONS:
        assert {value_of(each, dimension) for each in drawn} == {*values_of(dimension)}


def test_scenarios_ask_for_what_their_regimes_say() -> None:
    for regime in map(draw, range(NUM_DRAWN)):
        config = regime.config
        (island,) = config.islands
        assert island == regime.layout
        assert (config.be_backlog > 0) == (regime.best_effort == "backlog")
        assert (config.be_window_s is not None) == (regime.best_effort == "windows")
        assert bool(config.be_share) == (regime.best_effort in ("share", "windows"))
        assert (config.slo_mix is not None) == (regime.objectives == "mixed")
        assert (config.slo_tbt_ms == 0) == (regime.objectives == "none")
        assert config.pace == regime.pace
        assert (config.pool_memory_bytes is not None) == (regime.pool == "small")
        assert config.request_rate and config.policy == tuple(POLICIES)


def test_there_is_as_much_real_time_with_best_effort_as_without() -> None:
    for regime in map(draw, range(NUM_DRAWN)):
        num_be = round(regime.config.num_prompts * (regime.config.be_share or 0))
        assert regime.config.num_prompts - num_be >= 240 and regime.config.num_prompts <= 1200


def test_requests_come_for_longer_than_answers_take() -> None:
    """Else all of them would be in the instances at once, and a load of twice what fits would be none."""
    num_capped = 0
    for regime in map(draw, range(100)):
        config = regime.config
        cost = load_cost_model(regime.machine).with_attention(regime.attention)  # type: ignore[arg-type]
        lengths = [each.lengths for each in make_traffic(config)]
        fitting = [each for each in lengths if each.prompt + each.output <= MAX_MODEL_LEN]
        answer_s = regime.pace * Fitting(cost, regime.layout, fitting).answer_s
        is_capped = config.num_prompts == 1200
        num_capped += is_capped
        # The number follows from the lengths of the first 240.
        assert is_capped or config.num_prompts / (config.request_rate or 0.0) > 2.5 * answer_s
    assert num_capped < 40


def test_what_is_too_long_does_not_count_for_the_rate() -> None:
    """Of all that comes, as much as fits makes the load that a scenario is named by."""
    num_long = 0
    for regime in map(draw, range(100)):
        if value_of(regime, "pace") != "1":
            continue
        cost = load_cost_model(regime.machine).with_attention(regime.attention)  # type: ignore[arg-type]
        lengths = [each.lengths for each in make_traffic(regime.config)]
        fitting = [each for each in lengths if each.prompt + each.output <= MAX_MODEL_LEN]
        num_long += len(fitting) < len(lengths)
        rate = (regime.config.request_rate or 0.0) * len(fitting) / len(lengths)
        # It is rounded to three digits.
        assert rate == pytest.approx(regime.load * Fitting(cost, regime.layout, fitting).rate, rel=0.01)
    assert num_long


def traced(path: Path, lines: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, lines)))
    return path


def chats(path: Path, num_requests: int) -> Path:
    """Request k comes at k * k milliseconds, with 700 + k tokens."""
    lines = [{"timestamp": k * k, "input_length": 700 + k, "output_length": 90} for k in range(num_requests)]
    return traced(path, lines)


def test_a_quarter_of_scenarios_takes_a_trace_where_there_is_one(tmp_path: Path) -> None:
    trace = chats(tmp_path / "chats.jsonl", 30)
    share = sum(dice_of(number, (trace,)).lengths == "chats" for number in range(400)) / 400
    assert 0.2 < share < 0.3
    drawn = [draw(number, (trace,)) for number in range(60)]
    of_trace = [each for each in drawn if each.lengths == "chats"]
    assert {each.config.trace for each in of_trace} == {str(trace)}
    assert values_of("lengths", (trace,))[-1] == "chats"
    # Its bursts are its own.
    assert {(each.bursts, each.config.burstiness) for each in of_trace} == {("traced", 1.0)}
    assert values_of("bursts", (trace,)) == ["even", "bursts", "traced"]
    for each in drawn:
        if each.lengths != "chats":
            assert each == draw(each.number)


def test_a_trace_begins_anywhere_and_keeps_its_rhythm(tmp_path: Path) -> None:
    trace = chats(tmp_path / "chats.jsonl", 2000)
    of_trace = [
        each
        for each in (draw(number, (trace,)) for number in range(NUM_OF_TRACES))
        if each.lengths == "chats"
    ]
    starts = [each.config.trace_start for each in of_trace]
    assert min(starts) < 300 and max(starts) > 1200 and len({*starts}) > 0.9 * len(starts)
    for each in of_trace:
        start, num_requests = each.config.trace_start, each.config.num_prompts
        assert start + num_requests <= 2000
        found = make_traffic(each.config)
        assert [arrival.lengths.prompt for arrival in found] == [
            *range(700 + start, 700 + start + num_requests)
        ]
        stretch = found[-1].time_s / ((start + num_requests - 1) ** 2 - start**2)
        assert found[1].time_s == pytest.approx(stretch * (2 * start + 1))
        assert (num_requests - 1) / found[-1].time_s == pytest.approx(each.config.request_rate)


def test_load_is_of_what_instances_hold_of_a_trace(tmp_path: Path) -> None:
    """Half of this trace is left out, so that all of it comes twice as fast as what is left."""
    lines = [
        {"timestamp": 1000 * second, "input_length": length, "output_length": 90}
        for second, length in enumerate((700, 20_000, 700, 100_000))
    ]
    half, whole = traced(tmp_path / "half.jsonl", lines), traced(tmp_path / "whole.jsonl", lines[::2])
    of_trace = [number for number in range(100) if dice_of(number, (half,)).lengths == "half"]
    assert of_trace
    for number in of_trace:
        rates = [draw(number, (trace,)).config.request_rate or 0.0 for trace in (half, whole)]
        # Both are rounded to three digits.
        assert rates[0] == pytest.approx(2 * rates[1], rel=0.01)
    nothing = traced(tmp_path / "nothing.jsonl", [lines[3]])
    with pytest.raises(ValueError, match="each of 1 requests is longer than"):
        draw(of_trace[0], (nothing,))


def test_where_policies_are_wrong_about_time_the_world_is_what_it_is_named() -> None:
    """The rate and the objectives follow from how long iterations take, and not from what policies believe."""
    for number in range(20):
        right, slow = (draw(number, given={"pace": pace, "objectives": "tight"}) for pace in ("1", "1.3"))
        assert slow.config.pace == 1.3 and slow.load == right.load
        for name, ratio in (("request_rate", 1 / 1.3), ("slo_ttft_ms", 1.3), ("slo_tbt_ms", 1.3)):
            found = getattr(slow.config, name) / getattr(right.config, name)
            # Both are rounded to three digits.
            assert found == pytest.approx(ratio, rel=0.02)


def test_values_can_be_given_whatever_a_number_draws() -> None:
    for number in range(20):
        found = draw(number, given={"load": "2", "predictor": "none", "best_effort": "backlog"})
        assert (found.load, found.predictor, found.config.length_predictor) == (2.0, "none", "none")
        assert found.config.be_backlog and found.machine == draw(number).machine
    own = draw(7)
    assert draw(7, given={"load": value_of(own, "load"), "pace": value_of(own, "pace")}) == own
    tiny, small = (draw(7, given={"pool": pool}).config.pool_memory_bytes for pool in ("tiny", "small"))
    assert tiny and small and tiny <= small
    assert any(draw(n, given={"pool": "tiny"}) != draw(n, given={"pool": "small"}) for n in range(4))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"load": "0.55"}, "given: load='0.55': must be one of 0.05, 0.3"),
        ({"weather": "fine"}, "regime='weather': must be one of layout_name"),
        ({"layout_name": "1 + 1"}, "layout_name='1 [+] 1': only load, objectives, best_effort"),
    ],
)
def test_what_cannot_be_given_is_told(given: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw(0, given=given)


def test_scenarios_of_a_regime_are_the_next_that_have_it() -> None:
    regime = wanted_regime(["objectives=tight", "layout_name=1 + 1"])
    found = numbers_of(regime, first=10, count=5)
    assert found == sorted(found) and len(found) == 5
    for number in range(10, found[-1] + 1):
        drawn = dice_of(number, ())
        assert (number in found) == (drawn.objectives == "tight" and drawn.layout == (1, 1, 0))
    assert numbers_of({}, first=7, count=3) == [7, 8, 9]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["weather=fine"], "regime='weather': must be one of layout_name, machine, attention, lengths"),
        (["objectives"], "regime: objectives='': must be one of none, loose, tight, mixed, infeasible"),
        (["objectives=soft"], "objectives='soft': must be one of none, loose, tight, mixed, infeasible"),
        (["load=0.55"], "load='0.55': must be one of 0.05, 0.3, 0.5, 0.7, 0.8, 0.9, 1, 1.2, 1.5, 2"),
        (
            ["layout_name=9 colocated"],
            "must be one of 1 colocated, 2 colocated, 4 colocated, 8 colocated, 1 + 1",
        ),
    ],
)
def test_a_regime_that_does_not_exist_is_told_with_those_that_do(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("+", r"\+")):
        wanted_regime(words)


def test_a_number_or_a_regime_without_scenarios_is_told() -> None:
    with pytest.raises(ValueError, match="number=-1: scenarios have numbers from 0 on"):
        draw(-1)
    # A backlog fills what fits.
    with pytest.raises(
        ValueError, match="load=2, best_effort=backlog: 0 of the scenarios 5 to 1004 have it, not 1"
    ):
        numbers_of({"load": "2", "best_effort": "backlog"}, first=5, count=1, most_tried=1000)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--first", "-1"], "number=-1: scenarios have numbers from 0 on"),
        (["--count", "0"], "--count 0: must be at least 1"),
        (["--regime", "objectives=soft"], "must be one of none, loose, tight, mixed, infeasible"),
        (["--policy", "fcfs"], "--policy: must name aligned"),
        (["--given", "load=0.55"], "load='0.55': must be one of"),
        (["--regime", "pool=tiny"], "pool='tiny': must be one of roomy, small"),
        (["--given", "pool=tiny", "load=0.55"], "load='0.55': must be one of"),
        (["--given", "bursts=even"], "given: bursts='even': only load, objectives"),
        (["--curve", "-1"], "number=-1: scenarios have numbers from 0 on"),
        (["--traces", "nowhere"], "traces='nowhere': there is no trace in .csv or .jsonl"),
    ],
)
def test_a_mistake_is_told_before_anything_is_played(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["arena", *words])
    with pytest.raises(SystemExit) as ended:
        arena.main()
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_traces_are_told_from_other_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "b.jsonl").write_text('{"arrival_s": 0, "prompt_len": 3, "output_len": 4}\n')
    (tmp_path / "a.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,374,44\n")
    (tmp_path / "questions.jsonl").write_text('{"question": "why?"}\n')
    assert arena.found_traces(tmp_path) == (tmp_path / "a.csv", tmp_path / "b.jsonl")
    assert "questions.jsonl, line 1: has 'question': must hold 'TIMESTAMP'" in capsys.readouterr().err


# ---- commands -------------------------------------------------------------------------------------------------------


def test_the_command_of_a_scenario_means_the_same_scenario(tmp_path: Path) -> None:
    trace = chats(tmp_path / "some chats.jsonl", 400)
    for regime in (draw(number, (trace,)) for number in range(50)):
        options = options_of(regime.command(tuple(POLICIES)))
        found = SimConfig(**taken(SimConfig, options))
        assert found == regime.config
        # Nothing is left out that only the arena sets.
        assert options["enable_prefix_caching"] and not options["hidden_cache"]


def test_a_command_names_the_policies_that_it_is_asked_for() -> None:
    assert options_of(draw(3).command(("fcfs", "aligned")))["policy"] == ("fcfs", "aligned")
    baseline = options_of(draw(3).command(("aligned", "fcfs-recompute")))["policy"][1]
    assert make_policy(SchedulingConfig(baseline)).name == "fcfs-recompute"
