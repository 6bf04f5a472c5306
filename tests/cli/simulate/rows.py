"""Rows of comparisons whose figures are made up."""

from __future__ import annotations

from alignedserve.cli.simulate.compare import Row, Setting
from alignedserve.cli.simulate.mixture import BestEffort, Mixture, RealTime
from alignedserve.cli.simulate.trial import TrialOutcome
from alignedserve.sim.report import Quantiles

TIMES_S = Quantiles(0.1, 0.1, 0.2, 0.3)


def outcome(in_time: float, be_tokens_per_s: float = 0.0, num_rt: int = 100) -> TrialOutcome:
    num_be = 50 if be_tokens_per_s else 0
    return TrialOutcome(
        mixture=Mixture(
            rt=RealTime(num_rt, in_time, TIMES_S, TIMES_S, tokens_per_s=500.0),
            be=BestEffort(num_be, be_tokens_per_s, jobs_kept=None),
            num_evicted=0,
            num_dropped=0,
            num_sat_out=0,
            num_interrupted=0,
            moved_bytes=0,
            num_computed=1000,
            num_needed=1000,
            busy=0.5,
        ),
        be_answered_s=None,
        be_ttft_s=None,
        num_be_complete=num_be,
        num_refused=0,
        num_open=0,
        prefill_busy=0.5,
        mean_batch=8.0,
        num_batches=0,
        mixed=None,
        scheduled_soon=1.0,
        pool_peak=0.5,
        window_s=60.0,
        links=[],
    )


def row(
    policy: str,
    in_time: float,
    be_tokens_per_s: float = 0.0,
    num_decode: int = 1,
    num_rt: int = 100,
) -> Row:
    return Row(Setting(policy, 1, num_decode), 3.0, outcome(in_time, be_tokens_per_s, num_rt), tried=[])


def found(policy: str, rate: float) -> Row:
    """A row of a search for the highest rate; 0: it found none."""
    tried = [(4 * max(rate, 1.0), 0.2), (rate, 0.93)]
    return Row(Setting(policy, 1, 1), rate, outcome(0.93) if rate else None, tried)
