"""The arena: scenarios come from numbers alone, and verdicts from scores. One is played, and a small one."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from alignedserve.cli.simulate import command as simulate
from alignedserve.launch.settings import taken
from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.config import SimConfig
from benchmarks.arena import __main__ as arena
from benchmarks.arena.gate import failures
from benchmarks.arena.page import page
from benchmarks.arena.played import Score, comparison, play
from benchmarks.arena.plots import plot
from benchmarks.arena.record import Record
from benchmarks.arena.regimes import DIMENSIONS, Regime, draw, numbers_of, values_of, wanted_regime
from benchmarks.arena.regret import Judged, at, by_value, judge, standings

NUM_DRAWN = 400
# Machine, layout, load and objectives of the first scenarios.
DRAWN = [
    ("opt-13b/a100-80gb", (0, 0, 4), 0.5, "none"),
    ("qwen3-30b-a3b/h200", (1, 3, 0), 1.2, "infeasible"),
    ("opt-66b/a100-80gb-tp4", (4, 4, 0), 0.05, "tight"),
]


def score(policy: str, in_time: float, be_tokens_per_s: float = 0.0) -> Score:
    return Score(
        policy=policy,
        in_time=in_time,
        be_tokens_per_s=be_tokens_per_s,
        jobs_in_time=None,
        ttft_p50_s=0.1,
        ttft_p99_s=0.2,
        gap_p99_s=0.05,
        num_requests=240,
        num_open=0,
    )


def judged_of(in_time: Mapping[str, float], be: Mapping[str, float] | None = None, **changed: Any) -> Judged:
    """`changed`: what the scenario has else than scenario 0."""
    own: dict[str, Any] = {"load": 0.5, "best_effort": "share" if be else "none"}
    regime = replace(draw(0), **(own | changed))
    return judge(regime, [score(name, share, (be or {}).get(name, 0.0)) for name, share in in_time.items()])


# ---- draws ----------------------------------------------------------------------------------------------------------


def test_a_number_always_means_the_same_scenario() -> None:
    """Results of one day are compared with those of another: these were drawn when the arena was made."""
    assert [draw(number) for number in range(20)] == [draw(number) for number in range(20)]
    assert len({draw(number).config for number in range(200)}) == 200
    found = [(each.machine, each.layout, each.load, each.objectives) for each in map(draw, range(3))]
    assert found == DRAWN


def test_every_value_of_every_dimension_is_drawn() -> None:
    drawn = [draw(number) for number in range(NUM_DRAWN)]
    for dimension in DIMENSIONS:
        assert {each.value(dimension) for each in drawn} == {*values_of(dimension)}


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
        assert (config.pool_memory_bytes is not None) == (regime.pool == "small")
        assert config.request_rate and config.policy == tuple(POLICIES)


def test_a_quarter_of_scenarios_takes_a_trace_where_there_is_one(tmp_path: Path) -> None:
    trace = tmp_path / "chats.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 700, "output_length": 90, "hash_ids": [1, 2]}\n')
    drawn = [draw(number, (trace,)) for number in range(NUM_DRAWN)]
    of_trace = [each for each in drawn if each.lengths == "chats"]
    assert {each.config.trace for each in of_trace} == {str(trace)}
    assert 0.2 < len(of_trace) / NUM_DRAWN < 0.3
    assert values_of("lengths", (trace,))[-1] == "chats"
    for each in drawn:
        if each.lengths != "chats":
            assert each == draw(each.number)


def test_load_is_of_what_instances_hold_of_a_trace(tmp_path: Path) -> None:
    """Half of this trace is left out, so that all of it comes twice as fast as what is left."""
    lines = [
        {"timestamp": 1000 * second, "input_length": length, "output_length": 90}
        for second, length in enumerate((700, 20_000, 700, 100_000))
    ]
    half, whole = tmp_path / "half.jsonl", tmp_path / "whole.jsonl"
    half.write_text("\n".join(map(json.dumps, lines)))
    whole.write_text("\n".join(map(json.dumps, lines[::2])))
    of_trace = [number for number in range(100) if draw(number, (half,)).lengths == "half"]
    assert of_trace
    for number in of_trace:
        rates = [draw(number, (trace,)).config.request_rate or 0.0 for trace in (half, whole)]
        # Both are rounded to three digits.
        assert rates[0] == pytest.approx(2 * rates[1], rel=0.01)
    nothing = tmp_path / "nothing.jsonl"
    nothing.write_text(json.dumps(lines[3]))
    with pytest.raises(ValueError, match="each of the first 1 requests is longer than"):
        draw(of_trace[0], (nothing,))


def test_scenarios_of_a_regime_are_the_next_that_have_it() -> None:
    regime = wanted_regime(["objectives=tight", "layout_name=1 + 1"])
    found = numbers_of(regime, first=10, count=5)
    assert found == sorted(found) and len(found) == 5
    for number in range(10, found[-1] + 1):
        drawn = draw(number)
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
    assert "questions.jsonl, line 1: has question: must hold TIMESTAMP" in capsys.readouterr().err


# ---- commands -------------------------------------------------------------------------------------------------------


def options_of(command: str) -> dict[str, Any]:
    program, name, *words = shlex.split(command)
    assert (program, name) == ("alignedserve", "simulate")
    return simulate.make_context(name, words).params


def test_the_command_of_a_scenario_means_the_same_scenario(tmp_path: Path) -> None:
    trace = tmp_path / "some chats.jsonl"
    trace.write_text('{"timestamp": 0, "input_length": 700, "output_length": 90}\n')
    for regime in (draw(number, (trace,)) for number in range(50)):
        options = options_of(regime.command(tuple(POLICIES)))
        found = SimConfig(**taken(SimConfig, options))
        assert found == regime.config
        # Nothing is left out that only the arena sets.
        assert options["enable_prefix_caching"] and not options["hidden_cache"]


def test_a_command_names_the_policies_that_it_is_asked_for() -> None:
    assert options_of(draw(3).command(("fcfs", "aligned")))["policy"] == ("fcfs", "aligned")


# ---- scores ---------------------------------------------------------------------------------------------------------


def test_regret_is_counted_from_the_best() -> None:
    judged = judged_of({"aligned": 0.9, "fcfs": 0.95, "bros": 0.2})
    assert {name: each.regret for name, each in judged.verdicts.items()} == {
        "aligned": 0.05,
        "fcfs": 0.0,
        "bros": 0.75,
    }
    assert [name for name, each in judged.verdicts.items() if each.is_best] == ["fcfs"]
    assert judged.verdicts["bros"].goodput_share == pytest.approx(0.2 / 0.95)


def test_best_effort_is_compared_where_real_time_is_level() -> None:
    judged = judged_of(
        {"aligned": 0.95, "fcfs": 0.94, "bros": 0.5}, {"aligned": 600, "fcfs": 800, "bros": 5000}
    )
    assert {name: each.be_share for name, each in judged.verdicts.items()} == {
        "aligned": 0.75,
        "fcfs": 1.0,
        "bros": None,
    }
    assert [name for name, each in judged.verdicts.items() if each.is_best] == ["fcfs"]
    nothing = judged_of({"aligned": 1.0, "fcfs": 1.0}, {"aligned": 0.0, "fcfs": 0.0})
    assert nothing.verdicts["aligned"].be_share is None


def test_where_nothing_is_in_time_there_is_no_share_of_it() -> None:
    judged = judged_of({"aligned": 0.0, "fcfs": 0.0})
    assert judged.verdicts["aligned"].goodput_share is None and judged.verdicts["aligned"].is_best


def test_standings_are_over_all_scenarios() -> None:
    judged = [
        judged_of({"aligned": 1.0, "fcfs": 0.9}, {"aligned": 90, "fcfs": 100}),
        judged_of({"aligned": 0.8, "fcfs": 0.9}, load=1.5),
        judged_of({"aligned": 0.5, "fcfs": 0.1}, load=2.0),
        judged_of({"aligned": 0.7, "fcfs": 0.7}, {"aligned": 50, "fcfs": 100}),
    ]
    first, second = standings(judged)
    assert (first.policy, second.policy) == ("aligned", "fcfs")
    assert first.mean == pytest.approx(0.1 / 4) and second.mean == pytest.approx(0.5 / 4)
    assert (first.worst, second.worst) == (0.1, 0.4)
    # It is not best where best effort has half of what it has under another one.
    assert (first.won, second.won) == (0.5, 0.5)
    assert (first.be_mean, first.be_p5, second.be_mean) == (0.75, 0.5, 1.0)
    assert first.overload_worst == pytest.approx(0.8 / 0.9) and second.overload_worst == pytest.approx(0.2)
    assert first.overload_mean == pytest.approx((0.8 / 0.9 + 1) / 2)


def test_a_quantile_is_one_of_the_values() -> None:
    values = [float(each) for each in range(1, 101)]
    assert [at(values, share) for share in (0.05, 0.5, 0.95, 0.98, 1.0)] == [5, 50, 95, 98, 100]
    assert at([7.0], 0.05) == at([7.0], 0.98) == 7.0


def test_regrets_are_found_by_regime() -> None:
    judged = [
        judged_of({"aligned": 0.8, "fcfs": 0.9}, load=1.0),
        judged_of({"aligned": 0.9, "fcfs": 0.8}, load=1.0),
        judged_of({"aligned": 0.5, "fcfs": 0.7}, load=2.0),
    ]
    assert by_value(judged, "load", "aligned") == {"1": [0.1, 0.0], "2": [0.2]}
    assert by_value(judged, "load", "bros") == {}


# ---- the gate -------------------------------------------------------------------------------------------------------

LEVEL = judged_of({"aligned": 1.0, "fcfs": 0.9})


def test_the_gate_opens_for_the_best() -> None:
    # A point behind is level: nothing is made of how shares are rounded.
    assert failures([LEVEL, judged_of({"aligned": 0.94, "fcfs": 0.95})], "aligned") == []
    be = judged_of({"aligned": 1.0, "fcfs": 1.0}, {"aligned": 96, "fcfs": 100})
    overload = judged_of({"aligned": 0.49, "fcfs": 0.5}, load=2.0)
    assert failures([LEVEL, be, overload], "aligned") == []
    # Another one that has as small a mean regret, and wins more often, is not ahead.
    assert failures([be], "aligned") == []


@pytest.mark.parametrize(
    ("judged", "found"),
    [
        ([judged_of({"aligned": 0.93, "fcfs": 0.95})], ["more than 1 point behind in 1 of 2: [0]"]),
        (
            [judged_of({"aligned": 0.9, "fcfs": 0.95})],
            ["more than 1 point behind in 1 of 2: [0]", "scenario 0: aligned is 5.0 points behind"],
        ),
        (
            [judged_of({"aligned": 1.0, "fcfs": 1.0}, {"aligned": 94, "fcfs": 100})],
            ["scenario 0: aligned has 0.94 of the best effort of the best"],
        ),
        (
            [judged_of({"aligned": 0.08, "fcfs": 0.1}, load=1.5)],
            ["more than 1 point behind", "scenario 0: aligned has 0.80 of the best goodput"],
        ),
        (
            [judged_of({"aligned": 0.0, "fcfs": 0.01}, load=1.5)],
            ["scenario 0: aligned has 0.00 of the best goodput"],
        ),
        (
            [judged_of({"aligned": 0.8, "fcfs": 1.0})],
            ["1 point behind in", "20.0 points behind", "fcfs has a smaller mean regret"],
        ),
    ],
)
def test_the_gate_says_what_is_too_far_behind(judged: list[Judged], found: list[str]) -> None:
    told = failures([LEVEL, *judged], "aligned")
    assert len(told) == len(found)
    for line, part in zip(told, found, strict=True):
        assert part in line


def test_two_of_a_hundred_may_be_behind_by_more_than_a_point() -> None:
    behind = judged_of({"aligned": 0.93, "fcfs": 0.95})
    assert failures([LEVEL] * 98 + [behind] * 2, "aligned") == []
    assert len(failures([LEVEL] * 97 + [behind] * 3, "aligned")) == 1


# ---- the record, and what is drawn of it ----------------------------------------------------------------------------


def test_a_record_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "arena.jsonl"
    first = Record(path)
    assert first.missing(3, ["aligned", "fcfs"]) == ["aligned", "fcfs"]
    first.add(3, [score("aligned", 0.9)])
    again = Record(path)
    assert again.missing(3, ["aligned", "fcfs"]) == ["fcfs"] and again.missing(4, ["fcfs"]) == ["fcfs"]
    again.add(3, [score("fcfs", 0.8)])
    assert Record(path).of(3, ["fcfs", "aligned"]) == [score("fcfs", 0.8), score("aligned", 0.9)]


def test_a_policy_can_be_tried_again(tmp_path: Path) -> None:
    path = tmp_path / "arena.jsonl"
    record = Record(path)
    record.add(3, [score("aligned", 0.9), score("fcfs", 0.8)])
    record.forget(["aligned"])
    assert record.missing(3, ["aligned", "fcfs"]) == ["aligned"]
    record.add(3, [score("aligned", 0.95)])
    assert Record(path).of(3, ["aligned"]) == record.of(3, ["aligned"]) == [score("aligned", 0.95)]
    assert len(path.read_text().splitlines()) == 3


def test_a_page_has_standings_regimes_and_the_worst_with_their_commands(tmp_path: Path) -> None:
    judged = [
        judge(draw(number), [score("aligned", 0.9 - number / 100), score("fcfs", 0.9)])
        for number in range(20)
    ]
    text = page(judged, "aligned", "a machine", "the command")
    assert "20 scenarios, numbers 0 to 19, in virtual time on a machine: `the command`." in text
    standing = next(line for line in text.splitlines() if line.startswith("| `aligned` |"))
    assert standing.startswith("| `aligned` | 10 % | 9.50 | 18.0 | 19.0 | 19.0 |")
    regimes, worst = text.partition("## Where `aligned` is furthest behind")[::2]
    for dimension in DIMENSIONS:
        shown = {
            line.split("|")[2].strip()
            for line in regimes.splitlines()
            if line.startswith(f"| {dimension.replace('_', ' ')} |")
        }
        assert shown == {each.regime.value(dimension) for each in judged}
    rows = [line for line in worst.splitlines() if "`alignedserve simulate" in line]
    assert [int(row.split("|")[1]) for row in rows] == list(range(19, 7, -1))
    for row, number in zip(rows, range(19, 7, -1), strict=True):
        command = row.split("`")[-2]
        found = SimConfig(**taken(SimConfig, options_of(command)))
        assert found == replace(draw(number).config, policy=("aligned", "fcfs"))
    # Where it is the best itself, it is set against the next.
    first = judge(draw(0), [score("aligned", 0.9), score("fcfs", 0.8), score("bros", 0.85)])
    assert "--policy aligned --policy bros`" in page([first], "aligned", "a machine", "the command")
    pytest.importorskip("matplotlib")
    plot(judged, "aligned", tmp_path / "arena.png")
    assert (tmp_path / "arena.png").read_bytes().startswith(b"\x89PNG")


# ---- one that is played ---------------------------------------------------------------------------------------------


def tiny(number: int, **changed: Any) -> Regime:
    regime = draw(number, policies=("aligned", "fcfs"))
    few: dict[str, Any] = {"num_prompts": 12, "input_len": 300, "output_len": 20, "be_backlog": 0}
    return replace(regime, config=replace(regime.config, **(few | changed)))


def test_a_scenario_is_played_as_its_command_plays_it(tmp_path: Path) -> None:
    regime = tiny(0, slo_ttft_ms=300.0, slo_tbt_ms=40.0, be_share=0.5, request_rate=20.0)
    found = tmp_path / "found.json"
    words = shlex.split(regime.command(("aligned", "fcfs")))[2:]
    done = CliRunner().invoke(simulate, [*words, "--output", str(found)])
    assert done.exit_code == 0, done.output
    rows = json.loads(found.read_text())["rows"]
    scores = play(regime)
    assert (
        [each.policy for each in scores] == [row["setting"]["policy"] for row in rows] == ["aligned", "fcfs"]
    )
    for each, row in zip(scores, rows, strict=True):
        mixture = row["outcome"]["mixture"]
        assert each.in_time == mixture["rt"]["attainment"]
        assert each.be_tokens_per_s == mixture["be"]["tokens_per_s"] > 0
        assert each.gap_p99_s == mixture["rt"]["gap_s"]["p99"]
        assert each.num_requests == mixture["rt"]["num_requests"] == 6
        assert each.num_open == 0


def test_objectives_that_cannot_be_kept_are_kept_by_none() -> None:
    assert [each.in_time for each in play(tiny(0, slo_ttft_ms=0.001, slo_mix=None, be_share=0.0))] == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize("number", range(24))
def test_nearly_all_that_a_scenario_sends_fits_its_instances(number: int) -> None:
    found = comparison(draw(number, policies=("aligned",)))
    assert found.num_too_long < 0.1 * draw(number).config.num_prompts
