"""The router's clock, and a request's deadlines on it, in seconds.

A gateway says how long a request has waited, not when it came: its clock may be another host's.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from alignedserve.protocol.messages import Submit
from alignedserve.timing.deadlines import Deadlines


class Clock:
    """It says when the event at hand happened, and stands still until the next one."""

    def __init__(self) -> None:
        self.now = 0.0


def arrived_s(submit: Submit, now: float) -> float:
    return now - submit.waited_s


def deadlines_of(submit: Submit, now: float) -> Deadlines:
    """The next token of a request that has some already is due from `now` on: time that was lost with an earlier router
    is not to be caught up."""
    request, arrival_s = submit.request, arrived_s(submit, now)
    if request.tier != "rt":
        due_s = math.inf if request.deadline_s is None else arrival_s + request.deadline_s - request.arrival_s
        return Deadlines(job_due_s=due_s, is_pressed=request.is_pressed)
    ttft_s = math.inf if request.ttft_s is None else request.ttft_s
    tbt_s = math.inf if request.tbt_s is None else request.tbt_s
    deadlines = Deadlines(True, arrival_s + ttft_s, tbt_s, hurries=request.hurries)
    return _due_from(deadlines, len(submit.delivered), now) if submit.delivered else deadlines


def with_first_token(deadlines: Deadlines, now: float) -> Deadlines:
    """The first token came at `now`: from here on the gaps count. If it was early, that is no reason to let its reader
    wait longer for the next one."""
    return replace(deadlines, first_due_s=now) if deadlines.is_rt else deadlines


def _due_from(deadlines: Deadlines, num_tokens: int, now: float) -> Deadlines:
    """The next token is due a gap from now at the earliest."""
    gaps_s = (num_tokens - 1) * deadlines.tbt_s if deadlines.tbt_s < math.inf else 0.0
    first_due_s = deadlines.first_due_s
    is_late = first_due_s == math.inf or first_due_s + gaps_s < now
    return replace(deadlines, first_due_s=now - gaps_s) if is_late else deadlines
