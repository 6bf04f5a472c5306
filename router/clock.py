"""The router's clock, and a request's deadlines on it, in seconds.

A gateway sends how long a request has waited, not when it arrived, because the gateway may run on another host.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from alignedserve.protocol.messages import Submit
from alignedserve.timing.deadlines import Deadlines


class EventClock:
    """The time of the current event. It stands still until the next event."""

    def __init__(self) -> None:
        self.now = 0.0


def arrived_s(submit: Submit, now: float) -> float:
    return now - submit.waited_s


def deadlines_of(submit: Submit, now: float) -> Deadlines:
    """Returns the deadlines of a submitted request. If it already has tokens, its next one is due from `now` on: it
    need not catch up on time that was lost with an earlier router."""
    request, arrival_s = submit.request, arrived_s(submit, now)
    if request.tier != "rt":
        due_s = math.inf if request.deadline_s is None else arrival_s + request.deadline_s - request.arrival_s
        return Deadlines(job_due_s=due_s, is_pressed=request.is_pressed)
    ttft_s = math.inf if request.ttft_s is None else request.ttft_s
    tbt_s = math.inf if request.tbt_s is None else request.tbt_s
    deadlines = Deadlines(True, arrival_s + ttft_s, tbt_s, hurries=request.hurries)
    return _due_from(deadlines, len(submit.delivered), now) if submit.delivered else deadlines


def with_first_token(deadlines: Deadlines, now: float) -> Deadlines:
    """Returns the deadlines of a request with its first token at `now`: from here on, the gaps between tokens count. An
    early first token does not let the next one come later."""
    if not deadlines.is_rt:
        return deadlines
    early_s = 0.0 if deadlines.first_due_s == math.inf else max(deadlines.first_due_s - now, 0.0)
    return replace(deadlines, first_due_s=now, early_s=early_s)


def _due_from(deadlines: Deadlines, num_tokens: int, now: float) -> Deadlines:
    """Returns the deadlines, moved so that the next token is due at `now` at the earliest."""
    gaps_s = (num_tokens - 1) * deadlines.tbt_s if deadlines.tbt_s < math.inf else 0.0
    first_due_s = deadlines.first_due_s
    is_late = first_due_s == math.inf or first_due_s + gaps_s < now
    return replace(deadlines, first_due_s=now - gaps_s) if is_late else deadlines
