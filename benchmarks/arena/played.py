"""Plays a scenario with each policy in virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from alignedserve.cli.simulate.compare import Comparison, Row
from alignedserve.engine.config import EngineConfig
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.trace import Arrival
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.arena.baselines import name_of
from benchmarks.arena.regimes import Regime


@dataclass(frozen=True, kw_only=True)
class Score:
    policy: str
    # Share of real time that is in time; 1 if there is none.
    in_time: float
    # Output tokens per second of best effort, in the window in which real time arrives and ends; 0 if there is none.
    be_tokens_per_s: float
    # Share of jobs that end within their windows; None if there are no windows.
    jobs_in_time: float | None
    # Mean seconds from the arrival of a real-time request to its last token; 0 if there is none.
    answer_s: float
    # Seconds to the first token at the median and p99, and between two tokens at the p99.
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p99_s: float
    num_requests: int
    num_open: int


class Silent:
    """See alignedserve.cli.simulate.compare.Progress."""

    def begin(self, name: str, total: int) -> None: ...

    def advance(self) -> None: ...

    def tried(self, name: str, rate: float, attainment: float) -> None: ...


def play(regime: Regime) -> list[Score]:
    compared = comparison(regime)
    return [_score(row, compared.workload.traffic) for row in compared.rows(Silent())]


def comparison(regime: Regime) -> Comparison:
    """Returns the scenario's comparison. Raises ValueError if it is impossible, for instance if an instance can't hold
    the longest request."""
    config = regime.config
    told = SchedulingConfig(config.policy[0], be_share=config.be_min_share)
    engine = EngineConfig("simulated", max_model_len=config.max_model_len)
    return Comparison(config, load_cost_model(config.cost), engine, RouterConfig(), told)


def _score(row: Row, traffic: Sequence[Arrival]) -> Score:
    outcome = row.outcome
    assert outcome is not None, "only a search ends without one"
    rt, be = outcome.mixture.rt, outcome.mixture.be
    num_tokens = [each.lengths.output for each in traffic if each.tier == "rt"]
    return Score(
        policy=name_of(row.setting.policy),
        in_time=rt.attainment if rt.num_requests else 1.0,
        be_tokens_per_s=be.tokens_per_s,
        jobs_in_time=be.jobs_kept,
        answer_s=rt.ttft_s.mean + rt.gap_s.mean * (fmean(num_tokens) - 1) if num_tokens else 0.0,
        ttft_p50_s=rt.ttft_s.p50,
        ttft_p99_s=rt.ttft_s.p99,
        gap_p99_s=rt.gap_s.p99,
        num_requests=rt.num_requests,
        num_open=outcome.num_open,
    )
