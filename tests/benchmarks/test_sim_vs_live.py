"""Both sides get the same requests and read figures in the same way, and the page shows deviations."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from msgspec.structs import replace

from alignedserve import demo
from alignedserve.protocol.messages import DecodeReport, NewTokens, Submit, Tokens
from alignedserve.router.events import Received, Send
from alignedserve.scheduling.policies import POLICIES
from alignedserve.sim.model import make_request
from alignedserve.sim.trace import Arrival, Lengths
from alignedserve.sim.world import NO_OVERHEAD, Overhead
from alignedserve.text.tokenizer import Tokenizer
from alignedserve.timing.cost_presets import load_cost_model
from alignedserve.types import GATEWAY, InstanceId, RequestKey
from benchmarks.gpu.record import Row
from benchmarks.sim_vs_live.__main__ import main, summary
from benchmarks.sim_vs_live.figures import NAMES, Door, Figures, Side, figures_of
from benchmarks.sim_vs_live.live import overhead_before
from benchmarks.sim_vs_live.model import DEMO, larger
from benchmarks.sim_vs_live.page import line, page
from benchmarks.sim_vs_live.requests import BE_OUTPUT, RT_OUTPUT, Asked, alone, fixed_list
from benchmarks.sim_vs_live.simulated import simulate

TOKENIZER = Tokenizer.from_directory(demo.MODEL_DIR)
# of a model as small as the demo model
COST = replace(load_cost_model("opt-13b/a100-80gb"), kv_bytes_per_token=2048)
ROOMY = 2000 * 16 * COST.kv_bytes_per_token
LIVE = Figures(0.01, 0.02, 0.001, 0.002, 1000.0)


@pytest.fixture(scope="module")
def asked() -> list[Asked]:
    return fixed_list(TOKENIZER, rate=2.0, num_requests=60, tbt_s=DEMO.tbt_s, seed=0)


def test_requests_are_fixed_by_the_seed(asked: list[Asked]) -> None:
    assert asked == fixed_list(TOKENIZER, rate=2.0, num_requests=60, tbt_s=DEMO.tbt_s, seed=0)
    tiers = [each.tier for each in asked]
    assert 15 < tiers.count("rt") < 45 and {each.tbt_s for each in asked} == {None, *DEMO.tbt_s}
    assert asked[-1].due_s == pytest.approx(30, rel=0.5)
    for each in asked:
        least, most = RT_OUTPUT if each.tier == "rt" else BE_OUTPUT
        assert least <= (each.max_tokens or 0) <= most and each.prompt_len > 10


def arrivals(asked: list[Asked]) -> list[Arrival]:
    """As if each came to the router at once."""
    return [
        Arrival(each.due_s, Lengths(each.prompt_len, each.max_tokens or 1), each.tier, tbt_s=each.tbt_s)
        for each in asked
    ]


def submitted(key: int, tier: str = "rt") -> Received:
    request = make_request(
        key, 10, 3, arrival_s=0.0, max_tokens=3, tier=tier, tbt_s=0.1 if tier == "rt" else None
    )
    return Received(GATEWAY, Submit(request))


def told(*news: tuple[int, int, int]) -> list[Send]:
    """A request, the number of its first token in this message, and how many there are."""
    return [
        Send(GATEWAY, Tokens([NewTokens(RequestKey(key), first, [7] * count) for key, first, count in news]))
    ]


def reported(pace: float, outside_s: float, num_computed: int, num_tokens: int, overrun: float) -> Received:
    report = DecodeReport(
        *([NewTokens(RequestKey(1), 0, [7] * num_tokens)], [], [], [], 0, 1, 1, 1, 0.5),
        pace=pace,
        num_computed=num_computed,
        outside_s=outside_s,
        overrun=overrun,
    )
    return Received(InstanceId("colocated-0"), report)


def test_figures_are_of_real_time_and_tokens_of_all() -> None:
    door = Door()
    door(1.0, submitted(1), [])
    door(2.0, submitted(2), [])
    door(2.5, submitted(3, "be"), [])
    door(3.0, reported(1.5, 0.001, 4, 2, 1.1), told((1, 0, 1), (2, 0, 1)))
    door(3.5, reported(1.6, 0.002, 1, 1, 1.2), told((1, 1, 1)))
    door(4.0, reported(1.7, 0.003, 0, 1, 1.3), told((1, 2, 1), (3, 0, 8)))
    found = door.figures([RequestKey(1), RequestKey(2), RequestKey(3)])
    assert found == figures_of([2.0, 1.0], [[3.0, 3.5, 4.0], [3.0]], num_tokens=12, span_s=3.0)
    assert found.tbt_p50_s == 0.5 and found.tokens_per_s == 4.0 and found.ttft_p90_s == 2.0
    assert door.last_to_come(2) == [2, 3]
    assert door.arrivals([RequestKey(2), RequestKey(3)]) == [
        Arrival(0.0, Lengths(10, 3), "rt", tbt_s=0.1),
        Arrival(0.5, Lengths(10, 3), "be"),
    ]
    assert door.iterations(3.2)["num_iterations"] == 1 and door.iterations(0.0)["iteration_s"] == 0.5


def test_what_the_simulator_is_told_is_read_off_the_requests_before() -> None:
    door = Door()
    # two that are alone, then one that is joined by another
    for key, arrived_s in ((1, 1.0), (2, 2.0), (3, 3.0), (4, 3.2), (5, 6.0)):
        door(arrived_s, submitted(key), [])
    door(1.6, reported(1.0, 0.1, 5, 1, 1.0), told((1, 0, 1)))
    door(2.7, reported(1.1, 0.1, 5, 1, 1.0), told((2, 0, 1)))
    door(3.7, reported(1.5, 0.2, 9, 1, 1.5), told((3, 0, 1)))
    door(4.2, reported(1.6, 0.4, 2, 2, 2.0), told((3, 1, 1), (4, 0, 1)))
    door(4.7, reported(1.7, 0.3, 2, 2, 3.0), told((3, 2, 1), (4, 1, 1)))
    door(6.7, reported(9.0, 9.0, 2, 2, 9.0), told((5, 0, 1)))
    assert door.messages_s() == pytest.approx([0.1, 0.2, 0.2])
    found = overhead_before(door, begin_s=6.0, num_alone=2)
    assert found.message_s == pytest.approx(0.075)
    assert dataclasses.replace(found, message_s=0.0) == Overhead(1.6, 0.3, 0.0, (2.0, 3.0), (1.5,))


@pytest.mark.slow
def test_iterations_take_longer_by_what_is_drawn_for_their_kind(asked: list[Asked]) -> None:
    plain, slow_decodes, slow_chunks, either = (
        simulate("fcfs", COST, ROOMY, overhead, arrivals(asked), len(asked))
        for overhead in (
            NO_OVERHEAD,
            Overhead(overruns=(2.0,)),
            Overhead(overruns_of_chunks=(2.0,)),
            Overhead(overruns=(1.0, 2.0)),
        )
    )
    gap_s = plain.figures.tbt_p50_s
    assert slow_decodes.figures.tbt_p50_s == pytest.approx(2 * gap_s, rel=0.1)
    assert slow_chunks.figures.ttft_p50_s > 1.5 * plain.figures.ttft_p50_s
    assert slow_chunks.figures.tbt_p50_s < 1.1 * gap_s
    mean_s = [each.iterations["iteration_s"] for each in (plain, either, slow_decodes)]
    assert 1.2 * mean_s[0] < mean_s[1] < 0.9 * mean_s[2]


def test_the_larger_model_can_be_served(tmp_path: Path) -> None:
    model = larger(tmp_path)
    assert model.kv_bytes_per_token == 12 * 2 * 4 * 64 * 2 and model.options[0] == str(tmp_path)
    assert Tokenizer.from_directory(tmp_path).encode("a list") == TOKENIZER.encode("a list")


def test_requests_that_come_alone_are_apart() -> None:
    found = alone(TOKENIZER, 3, 0.5, 0.1)
    assert [each.due_s for each in found] == [0.0, 0.5, 1.0] and {each.tier for each in found} == {"rt"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [
        "aligned",
        *(pytest.param(name, marks=pytest.mark.drawn(one_in=8)) for name in POLICIES if name != "aligned"),
    ],
)
def test_simulated_requests_have_all_their_tokens_and_what_iterations_take_more(
    asked: list[Asked], policy: str
) -> None:
    plain, slower = (
        simulate(policy, COST, ROOMY, overhead, arrivals(asked), len(asked))
        for overhead in (NO_OVERHEAD, Overhead(1.2, 0.01))
    )
    assert slower.figures.tbt_p50_s > plain.figures.tbt_p50_s and slower.iterations["num_evicted"] == 0
    assert slower.paired(slower) == {"first_token": 0, "last_token": 0} != slower.paired(plain)
    num_tokens = sum(each.max_tokens or 0 for each in asked)
    assert num_tokens / (asked[-1].due_s - asked[0].due_s) > plain.figures.tokens_per_s
    assert plain.figures.tokens_per_s >= slower.figures.tokens_per_s


def test_few_blocks_are_short_in_the_simulation_too(asked: list[Asked]) -> None:
    found = simulate("fcfs", COST, ROOMY // 25, NO_OVERHEAD, arrivals(asked), len(asked))
    assert found.iterations["num_evicted"] > 0


@pytest.mark.parametrize("pace", [1.0, 100.0])
def test_those_that_warm_up_do_not_count(asked: list[Asked], pace: float) -> None:
    """Live they are waited for, so they are over before the others come, however slow the simulation is."""
    last = simulate("fcfs", COST, ROOMY, Overhead(pace), arrivals(asked), 20)
    num_tokens = sum(each.max_tokens or 0 for each in asked[-20:])
    assert len(last.first_s) == 20 and last.iterations["num_evicted"] == 0
    assert last.iterations["tokens"] * last.iterations["num_iterations"] == pytest.approx(num_tokens)


@pytest.mark.slow
@pytest.mark.drawn(one_in=3)
def test_a_burst_comes_now_whenever_its_live_one_came(asked: list[Asked]) -> None:
    """Times are rounded, and never to before now."""
    for number in range(30):
        first, *others = arrivals(asked[number : number + 16])
        burst = [dataclasses.replace(each, time_s=others[0].time_s) for each in others]
        assert len(simulate("fcfs", COST, ROOMY, Overhead(), [first, *burst], 15).first_s) == 15


def test_a_request_is_held_against_its_own_live_one() -> None:
    """Quantiles are the same where the first request has what the second should."""
    live, simulated = (Side(LIVE, {}, waits_s, [2.0, 4.0]) for waits_s in ([1.0, 2.0], [2.0, 1.0]))
    assert live.paired(simulated) == {"first_token": 0.75, "last_token": 0.0}


def side(figures: Figures, **more: object) -> Row:
    return {
        "figures": {name: getattr(figures, name) for name in NAMES},
        "num_evicted": 0,
        "iteration_s": 0.001,
        "num_iterations": 1234,
    } | more


def test_what_is_off_is_marked_and_what_failed_is_said() -> None:
    simulated = Figures(0.0115, 0.01, 0.001, 0.00235, 900.0)
    paired = {"first_token": 0.12, "last_token": 0.34}
    row: Row = {"policy": "fcfs", "load": "high", "rate": 20.0, "kv_bytes": 64 << 20, "round": 0}
    measured = row | {
        "processor": "a CPU",
        "load_average": 2.34,
        "live": side(LIVE),
        "client": side(LIVE)["figures"],
        "overhead": summary(Overhead(1.25, 0.0005, 0.001, (1.0,), (1.5,))),
        "profile_waited_share": 0.01,
        "simulated": side(simulated, ratios=LIVE.ratios(simulated), paired=paired),
        "by_profile_alone": side(LIVE),
    }
    failed = row | {"policy": "apt", "error": "no answer:\nit died\n"}
    record = {
        "command": "this",
        "date": "today",
        "num_cpus": 2,
        "num_requests": 9,
        "rows": [measured, failed],
    }
    text = "\n".join(page(json.loads(json.dumps(record)), "x.json"))
    assert (
        "They are 2 of 4\nfigures" in text
        and "| 12% | 34% | 1% |" in text
        and "2.3 to 2.3" in text
        and "Not measured: apt, high: it died" in text
    )
    (table_row,) = [each for each in text.splitlines() if each.startswith("| `fcfs` | 10.00")]
    assert (
        "| 11.50 | 1.15 | 20.00 | 10.00 | **0.50** |" in table_row and "| 1,000 | 900 | 0.90 |" in table_row
    )
    assert "| 2.35 | **1.18** |" in table_row and table_row.endswith("| 1,234 | 1,234 | 0 | 0 |")
    assert "Not measured: apt" in "\n".join(page(record | {"rows": [failed]}, "x.json"))
    busy = "\n".join(page(record | {"rows": [measured | {"profile_waited_share": 0.5}]}, "x.json"))
    assert "They are 0 of 0\nfigures" in busy and "1 of 1 cases are not counted" in busy
    assert line(measured).startswith("fcfs") and line(failed).endswith("FAILED it died")


@pytest.mark.slow
@pytest.mark.drawn(one_in=8)
def test_a_live_burst_is_cut_into_iterations_as_it_is_in_simulation(tmp_path: Path) -> None:
    """Of which requests an iteration is does not depend on how fast the machine is."""
    few = ["--requests", "60", "--profile-s", "1", "--out", str(tmp_path)]
    main(["--policies", "fcfs", "--loads", "burst", *few])
    (row,) = json.loads((tmp_path / "sim_vs_live.json").read_text())["rows"]
    assert "error" not in row, row["error"]
    live, simulated = row["live"], row["simulated"]
    num_tokens = [each["tokens"] * each["num_iterations"] for each in (live, simulated)]
    assert num_tokens[0] == pytest.approx(num_tokens[1])
    assert live["num_iterations"] == pytest.approx(simulated["num_iterations"], rel=0.1)
    assert live["num_evicted"] > 0 and simulated["num_evicted"] > 0
    assert row["overhead"]["outside_s"] > 0 and all(ratio > 0 for ratio in simulated["ratios"].values())
    assert "all at once" in (tmp_path / "sim_vs_live.md").read_text()
