"""The arena's record and page, and scenarios that are played: small ones."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from alignedserve.cli.simulate.command import command as simulate
from alignedserve.cli.simulate.compare import Comparison
from alignedserve.cli.simulate.config import SimConfig
from alignedserve.engine.config import EngineConfig
from alignedserve.launch.settings import taken
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import POLICIES
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.arena import __main__ as arena
from benchmarks.arena.baselines import BASELINES, path_of
from benchmarks.arena.digests import ROOT, code_digest, files_of, scenario_digest
from benchmarks.arena.page import page
from benchmarks.arena.played import Silent, comparison, play
from benchmarks.arena.plots import plot
from benchmarks.arena.record import Record, key_of
from benchmarks.arena.regimes import DIMENSIONS, Regime, dice_of, draw, numbers_of, value_of
from benchmarks.arena.regret import judge
from tests.benchmarks.arena_scores import options_of, score

# ---- the record -----------------------------------------------------------------------------------------------------


def test_a_record_goes_on_where_it_stopped(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "arena.jsonl"
    regime = draw(3)
    first, key = Record(path), key_of(regime, "aligned")
    assert key not in first and first.of(regime, ["aligned", "fcfs"]) == []
    first.add(key, score("aligned", 0.9))
    again = Record(path)
    assert key in again and key_of(regime, "fcfs") not in again and key_of(draw(4), "aligned") not in again
    again.add(key_of(regime, "fcfs"), score("fcfs", 0.8))
    assert Record(path).of(regime, ["fcfs", "aligned"]) == [score("fcfs", 0.8), score("aligned", 0.9)]


def test_a_policy_can_be_tried_again(tmp_path: Path) -> None:
    path, regime = tmp_path / "arena.jsonl", draw(3)
    record, keys = Record(path), {name: key_of(regime, name) for name in ("aligned", "fcfs")}
    for name in keys:
        record.add(keys[name], score(name, 0.9))
    record.forget(["aligned"])
    assert keys["aligned"] not in record and keys["fcfs"] in record
    record.add(keys["aligned"], score("aligned", 0.95))
    assert Record(path).of(regime, ["aligned"]) == record.of(regime, ["aligned"]) == [score("aligned", 0.95)]
    assert len(path.read_text().splitlines()) == 3


def test_a_score_of_another_scenario_or_of_other_code_is_none_of_this_one(tmp_path: Path) -> None:
    path, regime = tmp_path / "arena.jsonl", draw(3)
    record, key = Record(path), key_of(regime, "aligned")
    for other in (replace(key, scenario="0"), replace(key, code="0"), replace(key, number=4)):
        record.add(other, score("aligned", 0.5))
    # Earlier versions wrote scores by number and policy alone.
    with path.open("a") as file:
        file.write(json.dumps({"number": 3} | asdict(score("aligned", 0.5))) + "\n")
    assert key not in Record(path) and Record(path).of(regime, ["aligned"]) == []


def test_an_error_is_no_score(tmp_path: Path) -> None:
    path, key = tmp_path / "arena.jsonl", key_of(draw(3), "aligned")
    Record(path).failed(key, "ValueError: no")
    assert key not in Record(path) and json.loads(path.read_text())["error"] == "ValueError: no"


def test_a_scenario_is_told_by_all_that_it_is(tmp_path: Path) -> None:
    config = draw(3).config
    assert scenario_digest(config) == scenario_digest(replace(config, policy=("fcfs",)))
    for changed in ({"pace": 0.7}, {"seed": 5}, {"request_rate": 1.0}, {"length_predictor": "exact"}):
        assert scenario_digest(config) != scenario_digest(replace(config, **changed))
    # A trace counts by what it holds.
    for folder, text in (("a", "1"), ("b", "1"), ("c", "2")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "trace.csv").write_text(text)
    digests = [scenario_digest(replace(config, trace=str(tmp_path / name / "trace.csv"))) for name in "abc"]
    assert digests[0] == digests[1] != digests[2]


def test_code_is_that_of_a_policy_and_of_what_runs_it() -> None:
    names = [*POLICIES, *BASELINES]
    # Apt-Serve's two are in one file.
    modules = {policy.__module__ for policy in POLICIES.values()}
    assert len({code_digest(name) for name in POLICIES}) == len(modules) == len(POLICIES) - 1
    files = {name: {str(path.relative_to(ROOT)) for path in files_of(name)} for name in names}
    policies = "alignedserve/scheduling/policies"
    for found in files.values():
        assert {"alignedserve/scheduling/policy.py", "alignedserve/scheduling/decoding.py"} <= found
        assert {"alignedserve/cli/simulate/trial.py", "alignedserve/router/dispatch.py"} <= found
        assert "alignedserve/timing/cost.py" in found
    # `aligned` and `bros` take parts of `priority`, which a change in `aligned` does not concern.
    assert f"{policies}/priority.py" in (files["aligned"] & files["bros"]) - files["fcfs"]
    assert (
        f"{policies}/aligned/decode/slo_scheduler.py" in files["aligned"] - files["priority"] - files["fcfs"]
    )
    assert "research/papers/baselines.py" in files["prompts-first-recompute"] - files["fcfs"]


# ---- the page -------------------------------------------------------------------------------------------------------


def test_a_page_has_standings_regimes_and_the_worst_with_their_commands(tmp_path: Path) -> None:
    numbers = [
        number for number in range(40) if dice_of(number, ()).objectives not in ("none", "infeasible")
    ][:20]
    late = [draw(number) for number in numbers]
    judged = [
        judge(drawn, [score("aligned", 0.9 - k / 100), score("fcfs", 0.9)]) for k, drawn in enumerate(late)
    ]
    text = page(judged, "aligned", "a machine", "the command")
    assert (
        f"20 scenarios, numbers {numbers[0]} to {numbers[-1]}, in virtual time on a machine: `the command`."
        in text
    )
    standing = next(line for line in text.splitlines() if line.startswith("| `aligned` |"))
    assert standing.startswith("| `aligned` | 0 % | 9.50 | 18.0 | 19.0 | 19.0 |")
    regimes, worst = text.partition("## Where `aligned` is furthest behind")[::2]
    for dimension in DIMENSIONS:
        shown = {
            line.split("|")[2].strip()
            for line in regimes.splitlines()
            if line.startswith(f"| {dimension.replace('_', ' ')} |")
        }
        assert shown == {value_of(each.regime, dimension) for each in judged}
    rows = [line for line in worst.splitlines() if "`alignedserve simulate" in line]
    assert [int(row.split("|")[1]) for row in rows] == numbers[:7:-1]
    for row, number in zip(rows, numbers[:7:-1], strict=True):
        command = row.split("`")[-2]
        found = SimConfig(**taken(SimConfig, options_of(command)))
        assert found == replace(draw(number).config, policy=("aligned", "fcfs"))
    assert "## Errors" not in text
    text = page(judged, "aligned", "a machine", "the command", {"scenario 7, bros": "ValueError: no"})
    assert "## Errors\n\n- scenario 7, bros: ValueError: no\n" in text
    # Where it is the best itself, it is set against the next.
    first = judge(draw(0), [score("aligned", 0.9), score("fcfs", 0.8), score("bros", 0.85)])
    assert "--policy aligned --policy bros`" in page([first], "aligned", "a machine", "the command")
    pytest.importorskip("matplotlib")
    plot(judged, "aligned", tmp_path / "arena.png")
    assert (tmp_path / "arena.png").read_bytes().startswith(b"\x89PNG")


# ---- what is played -------------------------------------------------------------------------------------------------


def tiny(number: int, **changed: Any) -> Regime:
    regime = draw(number, policies=("aligned", "fcfs"))
    small: dict[str, Any] = {"num_prompts": 12, "input_len": 300, "output_len": 20, "be_backlog": 0}
    return replace(regime, config=replace(regime.config, **(small | changed)))


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
        # The mean of six answers of about twenty tokens.
        rt = mixture["rt"]
        assert rt["ttft_s"]["p50"] < each.answer_s < rt["ttft_s"]["p99"] + 40 * rt["gap_s"]["p99"]


def test_objectives_that_cannot_be_kept_are_kept_by_none() -> None:
    scores = play(tiny(0, slo_ttft_ms=0.001, slo_mix=None, be_share=0.0))
    assert [each.in_time for each in scores] == [0.0, 0.0]


@pytest.mark.parametrize("number", range(24))
def test_nearly_all_that_a_scenario_sends_fits_its_instances(number: int) -> None:
    found = comparison(draw(number, policies=("aligned",)))
    assert found.num_too_long < 0.1 * draw(number).config.num_prompts


def played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    """Returns the exit status."""
    argv = ["arena", "--policy", "aligned", "fcfs", "--jobs", "2", "--out", str(tmp_path / "out"), *words]
    monkeypatch.setattr("sys.argv", argv)
    with pytest.raises(SystemExit) as ended:
        arena.main()
    return int(ended.value.code or 0)


def few(path: Path, seconds: float) -> None:
    """Ten small requests; the next comes `seconds` after each."""
    lines = [{"arrival_s": seconds * k, "prompt_len": 200 + 10 * k, "output_len": 8} for k in range(10)]
    path.write_text("\n".join(map(json.dumps, lines)))


def test_a_run_plays_what_it_has_no_score_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scores are those of a trace's contents, of the values that are given, and of no other run's."""
    pytest.importorskip("matplotlib")
    for name in "ab":
        (tmp_path / name).mkdir()
        few(tmp_path / name / "few.jsonl", seconds=1.0)
    with (tmp_path / "b" / "few.jsonl").open("a") as file:
        file.write('\n{"arrival_s": 12, "prompt_len": 900, "output_len": 8}\n')
    words = ["--regime", "lengths=few", "--count", "1", "--given", "best_effort=none", "objectives=none"]

    def num_scores(*more: str) -> int:
        assert played(tmp_path, monkeypatch, *more) == 0
        return len((tmp_path / "out" / "arena.jsonl").read_text().splitlines())

    of_a, of_b = (["--traces", str(tmp_path / name), *words] for name in "ab")
    assert num_scores(*of_a) == num_scores(*of_a) == 2
    assert num_scores(*of_b) == 4
    assert num_scores(*of_a, "pace=0.7") == 6
    assert num_scores(*of_a) == 6
    # The gate is not for what was scored before, and nor is a policy that is named.
    assert num_scores(*of_a, "--gate") == 7
    assert num_scores(*of_a, "--again", "fcfs") == 8
    text = (tmp_path / "out" / "arena.md").read_text()
    assert "1 scenarios, numbers" in text and f"--trace {tmp_path}/a/few.jsonl" in text
    number = text.split("numbers ")[1].split()[0]
    assert num_scores("--traces", str(tmp_path / "a"), "--curve", number, "--given", "best_effort=none") > 8
    assert (tmp_path / "out" / f"curve-{number}.md").read_text().startswith("# Goodput against load")


def test_an_error_in_one_scenario_loses_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ten requests at one moment have no rate that could be scaled: the simulation raises an error."""
    pytest.importorskip("matplotlib")
    traces = tmp_path / "few.jsonl", tmp_path / "same.jsonl"
    few(traces[0], seconds=1.0)
    few(traces[1], seconds=0.0)
    given = {"best_effort": "none", "objectives": "none"}
    regimes = {
        name: draw(numbers_of({"lengths": name}, 0, 1, traces)[0], traces, ("aligned", "fcfs"), given)
        for name in ("same", "few")
    }
    record = Record(tmp_path / "arena.jsonl")
    failed = arena.play_missing([*regimes.values()], ["aligned", "fcfs"], record, num_jobs=1)
    numbers = {name: regime.number for name, regime in regimes.items()}
    assert sorted(failed) == [f"scenario {numbers['same']}, {policy}" for policy in ("aligned", "fcfs")]
    assert {error.partition(" of 10")[0] for error in failed.values()} == {"ValueError: workload"}
    assert [each.policy for each in record.of(regimes["few"], ["aligned", "fcfs"])] == ["aligned", "fcfs"]
    assert record.of(regimes["same"], ["aligned", "fcfs"]) == []
    lines = [json.loads(line) for line in (tmp_path / "arena.jsonl").read_text().splitlines()]
    assert sorted("error" in line for line in lines) == [False, False, True, True]
    assert capsys.readouterr().out.startswith(f"{numbers['few']:5}  ")
    # The whole run says so, and its exit status too.
    words = ["--traces", str(tmp_path), "--regime", "lengths=same", "--count", "1"]
    assert played(tmp_path, monkeypatch, *words, "--given", "best_effort=none", "objectives=none") == 1
    assert f"scenario {numbers['same']}, aligned: ValueError: workload of 10" in capsys.readouterr().err
    assert not (tmp_path / "out" / "arena.md").exists()


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_computes_again_what_it_preempts(name: str) -> None:
    config = SimConfig(
        policy=(path_of(name), "fcfs"),
        colocated_instances=(1,),
        num_prompts=20,
        request_rate=50.0,
        input_len=300,
        output_len=200,
        max_model_len=1500,
    )
    cost = structs.replace(load_cost_model(config.cost), num_kv_tokens=4000)
    engine = EngineConfig("simulated", max_model_len=1500)
    compared = Comparison(config, cost, engine, RouterConfig(), SchedulingConfig(config.policy[0]))
    recomputing, swapping = (row.outcome.mixture for row in compared.rows(Silent()) if row.outcome)
    assert recomputing.num_dropped and not recomputing.num_evicted
    assert swapping.num_evicted and not swapping.num_dropped
