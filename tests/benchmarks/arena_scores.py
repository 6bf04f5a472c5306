"""Made-up scores and verdicts, and a command's output."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from alignedserve.cli.simulate.command import command as simulate
from benchmarks.arena.played import Score
from benchmarks.arena.regimes import draw
from benchmarks.arena.regret import Judged, judge


def score(policy: str, in_time: float, be_tokens_per_s: float = 0.0, **changed: Any) -> Score:
    found = Score(
        policy=policy,
        in_time=in_time,
        be_tokens_per_s=be_tokens_per_s,
        jobs_in_time=None,
        answer_s=1.0,
        ttft_p50_s=0.1,
        ttft_p99_s=0.2,
        gap_p99_s=0.05,
        num_requests=240,
        num_open=0,
    )
    return replace(found, **changed)


def judged_of(in_time: Mapping[str, float], be: Mapping[str, float] | None = None, **changed: Any) -> Judged:
    """`changed`: how the scenario differs from scenario 0."""
    return judged_from(
        [score(name, share, (be or {}).get(name, 0.0)) for name, share in in_time.items()],
        **({"best_effort": "share"} if be else {}) | changed,
    )


def judged_from(scores: list[Score], **changed: Any) -> Judged:
    own: dict[str, Any] = {"load": 0.5, "best_effort": "none", "objectives": "loose"}
    return judge(replace(draw(0), **(own | changed)), scores)


def options_of(command: str) -> dict[str, Any]:
    program, name, *words = shlex.split(command)
    assert (program, name) == ("alignedserve", "simulate")
    return simulate.make_context(name, words).params
