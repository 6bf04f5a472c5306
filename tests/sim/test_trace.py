from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest

from alignedserve.sim.trace import (
    Arrival,
    Lengths,
    LognormalLengths,
    cut,
    poisson_arrivals,
    rate_of,
    read_azure_trace,
    scale_rate,
)

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:50.6805900,879,55
"""
WORKLOAD = [Arrival(float(second), Lengths(10 * second + 1, second + 1)) for second in range(5)]


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_a_trace_is_read_in_order_of_time(tmp_path: Path) -> None:
    first, second, third = read_azure_trace(written(tmp_path, AZURE))
    assert first == Arrival(0.0, Lengths(374, 44))
    assert second == Arrival(4.0, Lengths(879, 55))
    assert third.lengths == Lengths(396, 109)
    assert third.time_s == pytest.approx(4.314579)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("ContextTokens", "Context", "must hold 'TIMESTAMP', 'ContextTokens', 'GeneratedTokens'"),
        ("396", "0", r"line 3: ContextTokens='0': must be an integer, at least 1"),
        ("55", "5.5", r"line 4: GeneratedTokens='5.5'"),
        ("2023-11-16 18:15:46.6805900", "yesterday", r"line 2: TIMESTAMP='yesterday'"),
        (",879,55", ",879", r"line 4: GeneratedTokens=None"),
    ],
)
def test_a_bad_trace_is_refused_by_line(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_azure_trace(written(tmp_path, AZURE.replace(old, new)))


def test_an_empty_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no requests"):
        read_azure_trace(written(tmp_path, AZURE.splitlines()[0] + "\n"))


def test_a_scaled_trace_keeps_its_rhythm() -> None:
    scaled = scale_rate(WORKLOAD, 4.0)
    assert rate_of(WORKLOAD) == 1.0
    assert rate_of(scaled) == pytest.approx(4.0)
    assert [arrival.time_s for arrival in scaled] == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert [arrival.lengths for arrival in scaled] == [arrival.lengths for arrival in WORKLOAD]


def test_a_cut_keeps_the_first() -> None:
    assert cut(WORKLOAD, num_requests=2) == WORKLOAD[:2]
    assert cut(WORKLOAD, seconds=3.0) == WORKLOAD[:3]
    assert cut(WORKLOAD, num_requests=2, seconds=1.0) == WORKLOAD[:1]
    assert cut(WORKLOAD) == WORKLOAD


def test_poisson_arrivals_have_the_rate_asked_for_and_repeat() -> None:
    lengths = [Lengths(5, 5)] * 4000
    workload = poisson_arrivals(lengths, rate=8.0, seed=1)
    assert rate_of(workload) == pytest.approx(8.0, rel=0.05)
    assert workload == poisson_arrivals(lengths, rate=8.0, seed=1)
    assert workload != poisson_arrivals(lengths, rate=8.0, seed=2)


def test_lognormal_lengths_have_their_median_and_stay_in_bounds() -> None:
    lengths = LognormalLengths(median_prompt=1000, median_output=100, max_prompt=4000).sample(4000, seed=3)
    assert median(each.prompt for each in lengths) == pytest.approx(1000, rel=0.1)
    assert median(each.output for each in lengths) == pytest.approx(100, rel=0.1)
    assert max(each.prompt for each in lengths) == 4000
    assert min(min(each.prompt, each.output) for each in lengths) >= 1


def test_what_has_no_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="has no rate"):
        scale_rate(WORKLOAD[:1], 2.0)
    with pytest.raises(ValueError, match="rate=0: must be above 0"):
        scale_rate(WORKLOAD, 0)
    with pytest.raises(ValueError, match="spread=-1"):
        LognormalLengths(10, 10, spread=-1).sample(1, seed=0)
