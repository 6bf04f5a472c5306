"""What each policy makes of a scenario, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.engine.config import EngineConfig
from alignedserve.router.config import RouterConfig
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.sim.compare import Comparison, Row
from alignedserve.timing.cost_presets import load_cost_model
from benchmarks.arena.regimes import Regime


@dataclass(frozen=True, kw_only=True)
class Score:
    policy: str
    # The share of real time that is in time; 1 where there is none.
    in_time: float
    # Output tokens per second of best effort, in the window in which real time comes and ends; 0 where there is none.
    be_tokens_per_s: float
    # The share of jobs with a window that ended within it; None where there are none.
    jobs_in_time: float | None
    # Seconds to the first token and between two, at the median and p99.
    ttft_p50_s: float
    ttft_p99_s: float
    gap_p99_s: float
    num_requests: int
    num_open: int


class _Silent:
    """See alignedserve.sim.compare.Progress."""

    def begin(self, name: str, total: int) -> None: ...

    def advance(self) -> None: ...

    def tried(self, name: str, rate: float, attainment: float) -> None: ...


def play(regime: Regime) -> list[Score]:
    return [_score(row) for row in comparison(regime).rows(_Silent())]


def comparison(regime: Regime) -> Comparison:
    """Raises ValueError for a scenario that can't be: an instance that does not hold the longest request, say."""
    config = regime.config
    told = SchedulingConfig(config.policy[0], be_share=config.be_min_share)
    engine = EngineConfig("simulated", max_model_len=config.max_model_len)
    return Comparison(config, load_cost_model(config.cost), engine, RouterConfig(), told)


def _score(row: Row) -> Score:
    outcome = row.outcome
    assert outcome is not None, "only a search ends without one"
    rt, be = outcome.mixture.rt, outcome.mixture.be
    return Score(
        policy=row.setting.policy,
        in_time=rt.attainment if rt.num_requests else 1.0,
        be_tokens_per_s=be.tokens_per_s,
        jobs_in_time=be.jobs_kept,
        ttft_p50_s=rt.ttft_s.p50,
        ttft_p99_s=rt.ttft_s.p99,
        gap_p99_s=rt.gap_s.p99,
        num_requests=rt.num_requests,
        num_open=outcome.num_open,
    )
