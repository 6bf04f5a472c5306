"""What a router's events say of one side's requests."""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import pairwise

from alignedserve.sim.report import quantiles
from alignedserve.types import RequestKey
from benchmarks.sim_vs_live.figures import Door


@dataclass(frozen=True)
class Score:
    # Share of real time with every token in time
    in_time: float
    ttft_p50_s: float
    ttft_p90_s: float
    gap_p50_s: float
    gap_p99_s: float
    # Best effort's output tokens per second, from the first arrival to the last token of real time
    be_tokens_per_s: float


NAMES = [each.name for each in fields(Score)]


def score(door: Door, count: int, ttft_s: float) -> Score:
    """Returns the score of the last `count` requests."""
    keys = door.last_to_come(count)
    rt = [key for key in keys if door.requests[key].tier == "rt"]
    be = [key for key in keys if door.requests[key].tier == "be"]
    begin_s, end_s = min(door.arrived_s[key] for key in keys), max(door.times_s[key][-1] for key in rt)
    firsts_s = quantiles([door.times_s[key][0] - door.arrived_s[key] for key in rt])
    gaps_s = quantiles([later - sooner for key in rt for sooner, later in pairwise(door.times_s[key])])
    num_tokens = sum(time_s <= end_s for key in be for time_s in door.times_s[key])
    return Score(
        sum(is_kept(door, key, ttft_s) for key in rt) / len(rt),
        firsts_s.p50,
        firsts_s.p90,
        gaps_s.p50,
        gaps_s.p99,
        num_tokens / (end_s - begin_s),
    )


def is_kept(door: Door, key: RequestKey, ttft_s: float) -> bool:
    """Returns whether every token came in time, by the rule of `is_kept` in alignedserve/cli/simulate/mixture.py. Time
    counts from the arrival at the router, since only that is the same on both sides. A token of a batch of tokens has
    its time."""
    times_s, tbt_s = door.times_s[key], door.requests[key].tbt_s
    due_s = door.arrived_s[key] + ttft_s
    return times_s[0] <= due_s and (
        tbt_s is None or all(time_s <= due_s + k * tbt_s for k, time_s in enumerate(times_s))
    )
