"""Reduces a failing history to a shortest one that still fails in the same way, by delta debugging over its actions
(Zeller and Hildebrandt, "Simplifying and isolating failure-inducing input", 2002)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from msgspec.structs import replace

from alignedserve.vopr.failures import Failure
from alignedserve.vopr.history import AnyAction, History
from alignedserve.vopr.runs.run import run

# Returns the failure of a history; None: it does not fail.
Fails = Callable[[History], Failure | None]


def _failure(history: History) -> Failure | None:
    return run(history).failure


class Shrinker:
    def __init__(
        self, history: History, fails: Fails = _failure, max_runs: int = 1000, max_s: float = math.inf
    ) -> None:
        """Raises ValueError if the history does not fail."""
        failure = fails(history)
        if failure is None:
            raise ValueError("the history does not fail")
        self._sort = failure.sort
        self._fails = fails
        self._num_left = max_runs
        self._until_s = time.monotonic() + max_s
        self.history = history
        self.failure = failure

    def shrink(self) -> History:
        """Leaves out everything after the failure, and then actions in ever smaller pieces. Stops when no single action
        can be left out, or after `max_runs` runs or `max_s` seconds."""
        early = [action for action in self.history.actions if action.at_s <= self.failure.at_s]
        self._try(early)
        num_pieces = 2
        while self._may_try and len(self.history.actions) > 1:
            actions = self.history.actions
            size = -(-len(actions) // num_pieces)
            starts = range(0, len(actions), size)
            if any(self._try(actions[:start] + actions[start + size :]) for start in starts):
                num_pieces = max(num_pieces - 1, 2)
            elif size == 1:
                break
            else:
                num_pieces = min(2 * num_pieces, len(actions))
        return self.history

    @property
    def _may_try(self) -> bool:
        return self._num_left > 0 and time.monotonic() < self._until_s

    def _try(self, actions: Sequence[AnyAction]) -> bool:
        """Keeps these actions if they fail in the same way. A history without an end of its own keeps its length."""
        if not self._may_try or len(actions) == len(self.history.actions):
            return False
        self._num_left -= 1
        shorter = replace(self.history, actions=list(actions))
        failure = self._fails(shorter)
        if failure is None or failure.sort != self._sort:
            return False
        self.history, self.failure = shorter, failure
        return True
