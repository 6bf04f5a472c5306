"""The time within which everything must end, and the number of events."""

from __future__ import annotations

from collections.abc import Iterable

from alignedserve.sim.clock import Clock
from alignedserve.vopr.failures import Broken
from alignedserve.vopr.plan import Plan
from alignedserve.vopr.speed import cost_of

# Seconds within which, once there is calm, some request must get a token or end.
STANDSTILL_S = 600.0
# Every open request must end within these seconds, plus this multiple of the time that all would take one after the
# other.
LIVENESS_S = 600.0
LIVENESS_TIMES = 3.0
# The most events in a window of virtual seconds. A run with more goes in circles: whole systems took at most 6,000.
MAX_EVENTS, WINDOW_S = 50_000, 10.0


class BoundedClock(Clock):
    """A clock that raises Broken, once, when a run goes in circles."""

    def __init__(self) -> None:
        super().__init__()
        self._window_end_s = WINDOW_S
        self._num_allowed = float(MAX_EVENTS)

    def step(self, until_s: float = float("inf")) -> bool:
        if self.now >= self._window_end_s:
            self._window_end_s, self._num_allowed = self.now + WINDOW_S, self.num_events + MAX_EVENTS
        if self.num_events >= self._num_allowed:
            # Whatever still has to end may take its time.
            self._window_end_s = self._num_allowed = float("inf")
            raise Broken(f"more than {MAX_EVENTS} events in {WINDOW_S:.0f} s: it goes in circles")
        return super().step(until_s)


def patience_s(plan: Plan, lengths: Iterable[tuple[int, int]]) -> float:
    """Returns the seconds by which every request must have ended, even if each runs alone and had to begin anew.
    `lengths`: of prompts and answers."""
    cost = cost_of(plan)
    alone_s = sum(
        cost.fastest_ttft_s(prompt_len, plan.max_num_batched_tokens)
        + output_len * cost.fastest_tbt_s(prompt_len)
        for prompt_len, output_len in lengths
    )
    return LIVENESS_S + LIVENESS_TIMES * alone_s
