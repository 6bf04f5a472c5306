"""The papers' claims as data, one experiment from its runs to the page, and claims that are not measured."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from msgspec import structs

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.sim.trace import Arrival, Lengths
from research.papers import accelgen, aligned_serve, baselines, bros, timed
from research.papers.__main__ import main
from research.papers.catalogue import PAPERS
from research.papers.claim import Claim, Size, finding
from research.papers.datasets import ACCELGEN_MIX, SHAREGPT
from research.papers.figures import iterations, quantile
from research.papers.machines import ONE_GPU, slower, with_memory
from research.papers.page import markdown, terminal
from research.papers.record import Record
from research.papers.run import tasks
from research.papers.verdict import Verdict, gain

ALISE_LATENCY = "reduction of the mean response latency, compared with order of arrival"
CLAIM = Claim(
    "rate",
    "the rate",
    "OPT-13B",
    "1.5x",
    "simulated",
    "{ratio:.2f}x",
    lambda numbers: gain(1.5, numbers["ratio"]),
    {Verdict.PARTLY: "because it is {ratio:.1f}"},
)


def rate(vllm: float) -> dict[str, float]:
    """Numbers of ALISE's rate on Alpaca."""
    shorter = ("shorter", "shorter_s", "shorter_vllm", "shorter_alise")
    others = ("vllm_rate", "now_rate", "alise", "seconds", *shorter)
    return {"vllm": vllm} | dict.fromkeys(others, 1.0)


def claim_of(paper: str, name: str) -> Claim:
    claims = [claim for experiment in PAPERS[paper].experiments for claim in experiment.claims]
    return next(claim for claim in claims if claim.name == name)


def test_claims_have_names_of_their_own() -> None:
    claims = [
        (paper.name, claim.name)
        for paper in PAPERS.values()
        for experiment in paper.experiments
        for claim in experiment.claims
    ]
    assert max(Counter(claims).values()) == 1
    assert {paper for paper, _ in claims} == set(PAPERS)


@pytest.mark.slow
def test_without_order_no_iteration_is_empty() -> None:
    """Far more comes than can be done, so that the instance is never idle for as long as a long prompt takes."""
    load = accelgen.Load(ACCELGEN_MIX, accelgen.RATE, 190)
    ran = accelgen.scenario("order").simulate(load.arrivals(seed=0), until_s=190)
    assert max(each.end_s for each in iterations(ran.lifetimes)) > 188


def test_the_verdict_is_that_of_the_seeds_median() -> None:
    found = finding("alise", CLAIM, [{"ratio": 1.1}, {"ratio": 9.0}, {"ratio": 1.2}])
    assert (found.verdict, found.ours, found.reason) == (Verdict.PARTLY, "1.20x", "because it is 1.2")
    assert list(found.numbers["ratio"]) == [1.1, 9.0, 1.2]
    assert finding("alise", CLAIM, [{"ratio": 9.0}]).verdict is Verdict.REPRODUCED


def test_single_claims_are_measured_with_those_of_the_same_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (task,) = tasks(["bros"], Size(seeds=1), ["be-lmsys"])
    assert "latency-lmsys" in [claim.name for claim in task.experiment.claims]
    with pytest.raises(SystemExit):
        main(["--paper", "bros", "--claim", "bursts"])
    assert "--claim bursts: must be one of packing-sharegpt, " in capsys.readouterr().err


def test_what_takes_time_of_the_clock_runs_last_and_once() -> None:
    todo = tasks(list(PAPERS), Size())
    is_timed = [task.experiment.is_timed for task in todo]
    assert is_timed == sorted(is_timed)
    assert any(is_timed)
    assert all(task.seed == 0 for task in todo if task.experiment.is_timed)


@pytest.mark.parametrize(
    "name",
    [
        baselines.PROMPTS_FIRST,
        baselines.ROUND_ROBIN,
        *accelgen.POLICIES.values(),
        *(system.policy for system in bros.SYSTEMS.values()),
        f"{bros.__name__}:WithoutSharing",
        aligned_serve.MIXING.policy,
        timed.policy_name(timed.TimedBros),
    ],
)
def test_baselines_and_ablations_are_policies(name: str) -> None:
    assert make_policy(SchedulingConfig(name)).summary


@pytest.mark.slow
@pytest.mark.drawn(one_in=4)
@pytest.mark.parametrize("name", [*accelgen.POLICIES, baselines.PROMPTS_FIRST])
def test_nothing_is_lost_without_a_method(name: str) -> None:
    arrivals = accelgen.Load(ACCELGEN_MIX, 1.0, 12, has_jobs=True).arrivals(seed=0)
    ran = accelgen.scenario(name).simulate(arrivals)
    assert all(stream.is_complete for stream in ran.streams)


@pytest.mark.slow
@pytest.mark.parametrize("system", ["rr", "bros"])
def test_a_job_of_best_effort_follows_the_last(system: str) -> None:
    ran = bros.run(bros.SYSTEMS[system], SHAREGPT, 2.0, 30.0, seed=0, size=4)
    be = bros.of_class(ran, "be")
    starts = Counter(stream.request.arrival_s for stream in be)
    assert len(starts) > 2
    assert set(starts.values()) == {4}
    ends = sorted(stream.ended_s for stream in be if stream.is_complete)
    # The second job begins when the fourth request has ended.
    assert sorted(starts)[1] == pytest.approx(ends[3], abs=0.01)
    assert bros.of_class(ran, "rt")


@pytest.mark.parametrize("name", ["vllm", "rr"])
def test_vllm_computes_again_what_it_preempts(name: str) -> None:
    made = bros.SYSTEMS[name].scenario()
    small = replace(made, cost=structs.replace(made.cost, num_kv_tokens=1600), max_model_len=1600)
    ran = small.simulate([Arrival(0.0, Lengths(300, 200)) for _ in range(8)])
    assert ran.pauses.dropped
    assert not ran.pauses.evicted


def test_longest_prompts_are_jobs_with_windows() -> None:
    arrivals = accelgen.Load(ACCELGEN_MIX, 8.0, 100, has_jobs=True).arrivals(seed=0)
    jobs = [each for each in arrivals if each.tier == "be"]
    assert 0.3 < len(jobs) / len(arrivals) < 0.4
    assert all(each.lengths.prompt > accelgen.JOB_TOKENS and each.window_s for each in jobs)
    assert all(each.ttft_s and each.tbt_s for each in arrivals if each.tier == "rt")


def test_an_iteration_waits_for_the_kv_of_requests_that_join() -> None:
    """It comes over PCIe: a gigabyte for each request."""
    lengths = [Lengths(1200, 60)] * 12
    whole = aligned_serve.WITHOUT_P.scenario()
    arrivals = aligned_serve.best_effort(lengths, 20.0, seed=0)
    beside, waiting = (each.simulate(arrivals) for each in (whole, aligned_serve.paused(whole)))
    longest_s = [max(each.duration_s for each in iterations(ran.lifetimes)) for ran in (beside, waiting)]
    assert longest_s[1] > longest_s[0] + 1200 * whole.cost.kv_bytes_per_token / 25e9


def test_a_slower_machine_takes_as_many_times_as_long() -> None:
    cost = with_memory(ONE_GPU, 1, 40e9)
    work = ([(0, 300), (512, 200)], [100, 700, 30])
    assert slower(cost, 2.5).iteration(*work) == pytest.approx(2.5 * cost.iteration(*work))


def test_memory_is_what_weights_leave() -> None:
    """An A100 of 40 GB uses 36 GB, of which weights take 26: KV of 0.82 MB a token fits 12,207 times."""
    assert with_memory(ONE_GPU, 1, 40e9).num_kv_tokens == 12_207


def test_quantiles_are_of_the_nearest_rank() -> None:
    values = [float(value) for value in range(1, 101)]
    assert (quantile(values, 0.1), quantile(values, 0.5), quantile(values, 0.99)) == (10.0, 50.0, 99.0)
    assert quantile([7.0], 0.99) == 7.0


def test_a_run_is_written_and_read_again(tmp_path: Path) -> None:
    record = Record.at(tmp_path / "papers.json")
    record.begin({"command": "one", "date": "d", "commit": "c", "num_cpus": 2, "minutes": 1.0})
    record.add("alise", "rate-alpaca", [rate(1.5)])
    record.write()
    again = Record.at(record.path)
    again.begin({"command": "two", "date": "d", "commit": "c", "num_cpus": 2, "minutes": 1.0})
    again.add("alise", "rate-alpaca", [rate(1.0)])
    assert [run["command"] for run in again.runs] == ["two"]
    (found,) = again.findings()
    assert found.verdict is Verdict.REFUTED
    page = markdown([found], again.runs)
    assert "1.00x" in page
    assert "Not measured yet" in page
    assert f"- {ALISE_LATENCY}" in page


@pytest.mark.slow
@pytest.mark.drawn(one_in=6)
def test_a_paper_is_measured_and_its_page_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--quick", "--paper", "accelgen", "--out", str(tmp_path), "--processes", "1"])
    said, page = capsys.readouterr().out, (tmp_path / "papers.md").read_text()
    measured = json.loads((tmp_path / "papers.json").read_text())["measured"]["accelgen"]
    assert {"throughput", "ablations", "overhead"} <= set(measured)
    assert "accelgen: tokens/s" in said
    assert "| tokens/s | 1.42 to 11.21x |" in page
    assert (tmp_path / "papers.png").stat().st_size > 1000
    main(["--quick", "--paper", "accelgen", "--out", str(tmp_path), "--continue"])
    assert json.loads((tmp_path / "papers.json").read_text())["measured"]["accelgen"] == measured


def test_what_was_measured_is_known() -> None:
    record = Record(Path("papers.json"), [{"command": "one"}])
    todo = {task.place: task for task in tasks(["alise"], Size(is_quick=True, seeds=1))}
    of_rate, *others = todo.values()
    assert not record.has(of_rate)
    record.add("alise", "rate-alpaca", [rate(1.5)])
    assert record.has(of_rate)
    assert not any(map(record.has, others))
    record.runs[0]["command"] = "one --quick"
    assert record.has(of_rate)
    assert not record.has(replace(of_rate, size=Size(is_quick=False)))


def test_numbers_of_an_older_version_of_a_claim_are_no_finding(tmp_path: Path) -> None:
    record = Record.at(tmp_path / "papers.json")
    record.begin({"command": "one"})
    record.add("alise", "rate-alpaca", [{"vllm": 1.5, "vllm_rate": 2.0}])
    assert record.findings() == []
    record.add("alise", "rate-alpaca", [rate(1.5)])
    assert [found.claim for found in record.findings()] == ["rate-alpaca"]


def test_a_claim_keeps_its_older_finding_until_it_is_measured_again(tmp_path: Path) -> None:
    names = ("text", "setup", "figure", "ours", "how", "reason")
    texts = {name: f"the {name}" for name in names} | {"verdict": "partly"}
    record = Record(tmp_path / "papers.json", [{"command": "one"}], older={"alise": {"rate-alpaca": texts}})
    record.write()
    (found,) = Record.at(record.path).findings()
    assert (found.ours, found.verdict, found.numbers) == ("the ours", Verdict.PARTLY, {})
    assert not record.has(tasks(["alise"], Size())[0])
    record.add("alise", "rate-alpaca", [rate(1.5)])
    assert [each.verdict for each in record.findings()] == [Verdict.REPRODUCED]


@pytest.mark.parametrize(
    ("run", "size"),
    [
        ({"command": "one"}, "2 seeds)"),
        ({"command": "one --quick"}, "2 seeds, with --quick)"),
        (
            {"command": "one", "date": "2026-11-24T07:07:43Z", "commit": "f8b1afd10a8d7abb"},
            "2 seeds, 2026-11-24 at f8b1afd10a8d)",
        ),
    ],
)
def test_the_page_says_how_much_was_measured_and_when(tmp_path: Path, run: dict[str, str], size: str) -> None:
    record = Record(tmp_path / "papers.json", [run])
    record.add("alise", "rate-alpaca", [rate(1.5)] * 2)
    said = markdown(record.findings(), [])
    assert f"30 minutes; ours: {size}" in said


def test_a_mean_that_hides_a_rate_without_the_gain_is_only_a_part() -> None:
    """At most 11.3 % less best effort than vLLM, and 8.8 % less than round robin."""
    claim = claim_of("bros", "be-sharegpt")
    numbers = {"vllm": 0.06, "rr": -0.08, "less_3": -0.08, "less_6": -0.07, "less_9": 0.05}
    assert claim.judge(numbers) is Verdict.REPRODUCED
    assert claim.judge(numbers | {"less_9": 0.33}) is Verdict.PARTLY


def test_both_rates_of_real_time_alone_must_have_both_gains() -> None:
    claim = claim_of("bros", "alone")
    numbers = {"less_10": 0.36, "less_15": 0.41, "more_10": 1.08, "more_15": 1.15}
    assert claim.judge(numbers) is Verdict.REPRODUCED
    assert claim.judge(numbers | {"more_10": 1.01}) is Verdict.PARTLY


def test_a_gain_that_falls_with_time_is_not_settled() -> None:
    claim = claim_of("alise", "rate-alpaca")
    assert claim.judge(rate(1.6) | {"shorter": 1.6}) is Verdict.REPRODUCED
    assert claim.judge(rate(1.6) | {"shorter": 1.8}) is Verdict.PARTLY


def test_each_model_must_have_apt_serve_s_gain() -> None:
    claim = claim_of("apt-serve", "rate-60-sharegpt")
    numbers = {f"{other}_{model}": 7.0 for other in ("vllm", "sarathi") for model in ("small", "large")}
    assert claim.judge(numbers) is Verdict.REPRODUCED
    assert claim.judge(numbers | {"vllm_small": 5.3, "vllm_large": 9.5}) is Verdict.PARTLY


def test_batches_may_mix_with_none_of_the_buffers() -> None:
    claim = claim_of("aligned-serve", "batch-switches")
    numbers = {f"{name}_{share}": 0.01 for name in ("sharegpt", "longbench") for share in (10, 20, 40)}
    assert claim.judge(numbers) is Verdict.REPRODUCED
    assert claim.judge(numbers | {"longbench_10": 0.87}) is Verdict.PARTLY


def test_a_gain_over_round_robin_must_be_there_beside_one_as_fast_as_the_paper_s() -> None:
    """By the paper, round robin has 0.41 of vLLM's latency on LMSYS-Chat-1M, and BROS 25.8 % less than that."""
    claim = claim_of("bros", "latency-lmsys")
    verdicts = [claim.judge(claim.complete({"vllm": vllm, "rr": 0.65})) for vllm in (0.75, 0.65)]
    assert verdicts == [Verdict.REPRODUCED, Verdict.PARTLY]


def test_ratios_of_attainment_are_those_of_the_means() -> None:
    numbers = {f"{name}_{what}": 0.5 for name in bros.SYSTEMS for what in ("ttft", "tpot")}
    found = finding("bros", claim_of("bros", "slo-sharegpt"), [numbers | {"vllm_ttft": 0.025}])
    assert found.ours.startswith("20.0x and 1.00x vLLM's, 1.0x and 1.00x round robin's")


def test_the_paper_s_answers_must_have_accelgen_s_gain_too() -> None:
    claim = claim_of("accelgen", "slo")
    numbers = {"vllm_short": 0.4, "accelgen_short": 0.9, "vllm_long": 0.4, "accelgen_long": 0.9}
    assert claim.judge(numbers) is Verdict.REPRODUCED
    assert claim.judge(numbers | {"vllm_long": 0.9}) is Verdict.PARTLY


def test_the_table_of_a_terminal_says_all_of_it() -> None:
    said = terminal([finding("alise", CLAIM, [{"ratio": 1.2}])])
    assert all(part in said for part in ("alise: the rate", "1.5x", "1.20x", "partly", "because it is 1.2"))
