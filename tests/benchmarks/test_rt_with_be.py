"""The arithmetic of RT beside BE: comparisons between cases, values read from /metrics, and the page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alignedserve.bench.client import RequestOutcome
from alignedserve.bench.config import BenchConfig
from benchmarks.rt_with_be import page, peer
from benchmarks.rt_with_be.__main__ import main
from benchmarks.rt_with_be.arithmetic import (
    Case,
    Row,
    Worth,
    difference,
    gaps_of,
    interval,
    is_kept,
    middle,
    num_different,
    num_needed,
    objectives_s,
    parse_metrics,
    real_time,
    total,
    worth,
    worths,
)
from benchmarks.rt_with_be.live import tried
from benchmarks.rt_with_be.plots import COLORS
from benchmarks.rt_with_be.simulated import Simulated, Workload
from benchmarks.rt_with_be.traffic import MAX_BE_OUTPUT, MIN_BE_OUTPUT, chats, lines

RT = Case(num_rt=4, ttft_p50_s=0.01, ttft_p99_s=0.02, gap_p50_s=0.001, gap_p99_s=0.004, busy=0.2)
BE = Case(be_tokens_per_s=1000.0, busy=1.0)
MIX = Case(4, 0.011, 0.03, 0.001, 0.004, 0.75, rt_tokens_per_s=100.0, be_tokens_per_s=720.0, busy=1.0)


def row(case: Case, name: str, number: int = 0, policy: str = "aligned") -> Row:
    return {"part": "live", "place": "1+1", "policy": policy, "round": number, "case": name} | case.as_row()


def outcome(
    *times_s: float, due_s: float = 1.0, error: str | None = None, output_len: int | None = None
) -> RequestOutcome:
    length = len(times_s) if output_len is None else output_len
    return RequestOutcome("rt", due_s, due_s, list(times_s), "text", 10, length, error)


def test_ratios_are_to_rt_alone_and_to_what_be_can_do_beside_it() -> None:
    found = worth(RT, BE, MIX)
    assert (found.ttft_p50, found.ttft_p99, found.gap_p99) == pytest.approx((1.1, 1.5, 1.0))
    # of 1,000: a fifth of the time is RT's; or its 100 tokens
    assert (found.be_by_time, found.be_by_tokens) == pytest.approx((0.9, 0.8))


def test_what_has_nothing_to_compare_with_is_no_number() -> None:
    assert math.isnan(worth(Case(busy=1.0), BE, MIX).be_by_time)
    assert math.isnan(worth(Case(), BE, MIX).ttft_p50)


def test_ratios_are_taken_within_rounds_that_are_complete() -> None:
    rows = [row(RT, "rt"), row(BE, "be"), row(MIX, "mix"), row(RT, "rt", 1), row(BE, "be", 1)]
    rows.append(row(MIX, "mix", 1, policy="fcfs"))
    assert worths(rows) == {("live", "1+1", "aligned"): [worth(RT, BE, MIX)]}


@given(st.lists(st.tuples(*[st.floats(0.1, 10)] * 5), min_size=1, max_size=7))
def test_the_middle_lies_between(values: list[tuple[float, ...]]) -> None:
    found = middle([Worth(*each) for each in values])
    ttfts = sorted(each[0] for each in values)
    assert ttfts[0] <= found.ttft_p50 <= ttfts[-1]
    assert middle([Worth(*each) for each in reversed(values)]) == found


@given(st.lists(st.floats(0, 1), min_size=1, max_size=50))
def test_gaps_add_up_to_the_time_between_first_and_last(steps: list[float]) -> None:
    times_s = [sum(steps[:count]) for count in range(1, len(steps) + 1)]
    gaps = gaps_of(times_s)
    assert len(gaps) == len(times_s) - 1
    assert sum(gaps) == pytest.approx(times_s[-1] - times_s[0])


def test_the_interval_of_ten_rounds_leaves_out_the_lowest_and_the_highest() -> None:
    # 2 * (1 + 10) / 2**10 is 2.1 %, and with the next ones it would be 10.9 %
    rounds = [Worth(*[float(number)] * 5) for number in (3, 1, 7, 5, 9, 2, 4, 10, 6, 8)]
    assert interval(rounds) == (Worth(*[2.0] * 5), Worth(*[9.0] * 5))
    # 2 / 2**5 is 6.25 %, 2 / 2**6 is 3.1 %
    assert interval(rounds[:5]) is None
    assert interval(rounds[:6]) == (Worth(*[1.0] * 5), Worth(*[9.0] * 5))


def test_a_case_is_made_of_what_clients_saw() -> None:
    outcomes = [outcome(1.5, 1.6, 1.8), outcome(3.1, 3.2, due_s=3.0, output_len=3)]
    found = real_time(outcomes, (0.3, 0.1), window_s=2.0)
    assert (found.num_rt, found.attainment, found.rt_tokens_per_s) == (2, 0.5, 3.0)
    assert (found.ttft_p50_s, found.ttft_p99_s) == pytest.approx((0.1, 0.5))
    assert (found.gap_p50_s, found.gap_p99_s) == pytest.approx((0.1, 0.2))
    assert real_time(outcomes, None, 2.0).attainment is None


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (outcome(1.5, error="HTTP 503"), "HTTP 503"),
        (outcome(1.5, 1.6, output_len=4), "4 tokens came in 2 pieces"),
    ],
)
def test_what_was_not_answered_or_not_seen_is_no_measurement(bad: RequestOutcome, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        real_time([bad], None, 1.0)


def test_two_tokens_may_share_a_piece_now_and_then() -> None:
    steady = outcome(*(1.5 + 0.1 * number for number in range(20)), output_len=20)
    joined = outcome(1.5, 1.6, 1.7, output_len=5)
    assert real_time([steady, joined], None, 1.0).num_rt == 2
    with pytest.raises(RuntimeError, match="10 tokens came in 6 pieces"):
        real_time([joined, joined], None, 1.0)


@pytest.mark.parametrize(
    ("times_s", "kept"),
    [((1.4, 1.6), True), ((1.1, 1.59), True), ((1.1, 1.61), False), ((1.6, 1.65), False), ((), False)],
)
def test_a_request_is_kept_when_each_token_is(times_s: tuple[float, ...], kept: bool) -> None:
    assert is_kept(outcome(*times_s), ttft_s=0.5, tbt_s=0.1) is kept
    assert not is_kept(outcome(*times_s, error="lost"), ttft_s=0.5, tbt_s=0.1)


def test_objectives_are_a_quarter_above_alone_in_whole_milliseconds() -> None:
    assert objectives_s(RT) == (0.025, 0.005)
    assert objectives_s(Case(ttft_p99_s=0.0101, gap_p99_s=0.0001)) == (0.013, 0.001)


METRICS = """# TYPE alignedserve:generation_tokens counter
alignedserve:generation_tokens_total{tier="be"} %d
alignedserve:generation_tokens_total{tier="rt"} 7
# TYPE alignedserve:computed_tokens counter
alignedserve:computed_tokens_total{instance="decode-0",role="decode"} 5
alignedserve:computed_tokens_total{instance="decode-1",role="decode"} 6
alignedserve:computed_tokens_total{instance="prefill-0",role="prefill"} 70
"""


def test_counters_are_summed_over_the_labels_that_are_not_asked_for() -> None:
    before, after = parse_metrics(METRICS % 10), parse_metrics(METRICS % 25)
    assert total(after, "computed_tokens_total", role="decode") == 11
    assert total(after, "computed_tokens_total") == 81
    assert difference(before, after, "generation_tokens_total", tier="be") == 15
    with pytest.raises(KeyError, match="computed_tokens_total"):
        total(after, "computed_tokens_total", role="router")


def test_the_last_token_needs_no_kv_and_differences_are_counted_both_ways() -> None:
    assert num_needed(10, 1) == 10
    assert num_different({"a": 1, "b": 2}, {"a": 1, "b": 3, "c": 4}) == 2


def test_traffic_is_decided_by_the_seed_and_has_the_rate_asked_for() -> None:
    items = chats(rate=20.0, seconds=200.0, cv=1.0, seed=1)
    assert items == chats(rate=20.0, seconds=200.0, cv=1.0, seed=1)
    assert items != chats(rate=20.0, seconds=200.0, cv=1.0, seed=2)
    assert len(items) == pytest.approx(4000, rel=0.1)
    asked = lines(50)
    assert asked == lines(50)
    assert {MIN_BE_OUTPUT <= body["max_tokens"] <= MAX_BE_OUTPUT for body in asked.values()} == {True}


@pytest.mark.slow
def test_a_simulated_table_that_runs_out_of_best_effort_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.rt_with_be.simulated.BE_PER_S", 0.1)
    with pytest.raises(RuntimeError, match="it has run out"):
        list(Simulated(Workload.made_up(1000), window_s=30.0).table(["fcfs"], None))


def test_a_part_that_was_measured_again_replaces_the_earlier(tmp_path: Path) -> None:
    files = [tmp_path / f"{number}.json" for number in range(2)]
    run = {"command": "python", "date": "today", "commit": "abc", "num_cpus": 2}
    first = [row(RT, "rt"), row(BE, "be"), row(MIX, "mix"), row(RT, "rt", policy="fcfs")]
    files[0].write_text(json.dumps(run | {"rows": first}))
    files[1].write_text(json.dumps(run | {"rows": [row(BE, "be")]}))
    runs, rows = page.merged(files)
    assert len(runs) == 2
    assert [(each["policy"], each["case"], each["run"]) for each in rows] == [
        ("aligned", "be", 1),
        ("fcfs", "rt", 0),
    ]


@pytest.mark.slow
@pytest.mark.drawn(one_in=2)
def test_the_page_of_a_simulated_run_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, from the command line to the page."""
    monkeypatch.setattr("benchmarks.rt_with_be.simulated.ISLANDS", ((1, 1),))
    main(["--parts", "exact", "--policies", "aligned", "--out", str(tmp_path)])
    (measured,) = json.loads((tmp_path / "rt_with_be.json").read_text())["rows"]
    assert measured["num_computed"] == measured["num_needed"] > 0
    assert measured["num_different"] == 0
    written = (tmp_path / "rt_with_be.md").read_text()
    assert f"| {measured['num_computed']:,.0f} | {measured['num_needed']:,.0f} | 0 |" in written


def test_what_failed_is_said_and_the_rest_stays(tmp_path: Path) -> None:
    def broken() -> Iterator[Row]:
        yield {"case": "rt"} | RT.as_row()
        raise RuntimeError("it fell over")

    rows = list(tried({"part": "live", "place": "1+1", "policy": "fcfs", "round": 0}, broken()))
    run = {"command": "python", "date": "today", "commit": "abc", "num_cpus": 2}
    written = page.markdown([run], rows)
    assert "| live | fcfs | RuntimeError: it fell over |" in written
    assert "| 1+1 | fcfs | 0 | RT alone |" in written


def test_the_page_has_ratios_cases_and_a_picture(tmp_path: Path) -> None:
    rows = [row(RT, "rt"), row(BE, "be"), row(MIX, "mix")]
    run = {"command": "python", "date": "today", "commit": "abc", "num_cpus": 2, "rows": rows}
    (tmp_path / "one.json").write_text(json.dumps(run))
    page.write([tmp_path / "one.json"], tmp_path)
    page.write([tmp_path / "rt_with_be.json"], tmp_path)
    written = (tmp_path / "rt_with_be.md").read_text()
    assert "## What did not run" not in written
    assert "| 1+1 | aligned | 1 | 1.10 | 1.50 | 1.00 | 0.90 | 0.80 |" in written
    assert "| 1+1 | aligned | 0 | RT with BE | 4 | 11.0 | 30.0 |" in written
    assert (tmp_path / "rt_with_be-live.png").stat().st_size > 1000


# ---- the peer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", peer.POLICIES)
def test_a_peer_listens_here_only_and_has_the_same_limits(policy: str) -> None:
    given_to = peer.command(Path("VENV/bin/python"), peer.POLICIES[policy], 8123)
    options = dict(zip(given_to[3:-2:2], given_to[4:-2:2], strict=True))
    assert given_to[:3] == ["VENV/bin/python", "-m", "vllm.entrypoints.openai.api_server"]
    assert (options["--host"], options["--port"]) == ("127.0.0.1", "8123")
    assert (options["--max-num-seqs"], options["--served-model-name"]) == ("64", "demo")
    assert options["--scheduling-policy"] == peer.POLICIES[policy]
    assert policy in COLORS


def test_lines_are_counted_when_they_are_written_and_one_that_failed_is_said() -> None:
    answered = '{"line": "line-0", "output_len": 7}\n{"line": "line-1", "output_len": 9}\n'
    assert peer.counted("", 5) == {"total": 5, "completed": 0, "failed": 0}
    assert peer.counted(answered + '{"line": "li', 5) == {"total": 5, "completed": 2, "failed": 0}
    with pytest.raises(RuntimeError, match="line-2: HTTP 400"):
        peer.counted(answered + '{"line": "line-2", "error": "HTTP 400: no"}\n', 5)


def test_a_piece_of_several_tokens_has_each_of_them_at_its_time() -> None:
    client = peer.TokenCounting(BenchConfig(), httpx2.AsyncClient(), "demo")
    seen = RequestOutcome("rt", 0.0)
    for text, num_tokens in (("", 0), ("1", 1), (", 2, 3", 4), ("", 5)):
        usage = {"prompt_tokens": 3, "completion_tokens": num_tokens}
        event = {"choices": [{"delta": {"content": text}}], "usage": usage}
        assert client._take(json.dumps(event).encode(), seen) is None
    # the token that ends it says nothing
    assert (seen.output_len, len(seen.times_s)) == (5, 4)
    assert gaps_of(seen.times_s)[1:] == [0.0, 0.0]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)).map(lambda pair: (min(pair), max(pair)))))
def test_spans_that_overlap_are_counted_once(spans: list[tuple[int, int]]) -> None:
    seconds = {second for begin, end in spans for second in range(begin, end)}
    assert peer.covered_s(spans) == len(seconds)


def test_the_page_shows_policies_that_it_does_not_know(tmp_path: Path) -> None:
    rows = [
        row(case, name, policy=policy)
        for policy in ("vllm", "another")
        for case, name in ((RT, "rt"), (BE, "be"), (MIX, "mix"))
    ]
    run = {"command": "python", "date": "today", "commit": "abc", "num_cpus": 2, "vllm": "0.32", "rows": rows}
    (tmp_path / "one.json").write_text(json.dumps(run))
    page.write([tmp_path / "one.json"], tmp_path)
    written = (tmp_path / "rt_with_be.md").read_text()
    assert "vLLM 0.32 for CPU" in written
    assert "| 1+1 | another | 1 | 1.10 | 1.50 | 1.00 | 0.90 | 0.80 |" in written
