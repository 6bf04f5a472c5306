"""Which prompt of real time starts next: while more wait than can be in time, those that let most be. Pure."""

from __future__ import annotations

from alignedserve.scheduling import routing
from alignedserve.scheduling.island import Island, RoutedRequest
from alignedserve.scheduling.policies.aligned.most_in_time import most_in_time
from alignedserve.scheduling.policies.priority import REAL_TIME
from alignedserve.timing.deadlines import due_s

# So many of those that wait are looked at, the most urgent.
MOST = 64
# What is known of how fast prompts are computed is halved whenever it is of so many of them: of these and of earlier
# ones together.
MEMORY = 32


class Savable:
    def __init__(self) -> None:
        # How long the last prompts took, one after the other, while others waited; how long they would have taken
        # alone; and how many they were.
        self._took_s = self._alone_s = self._count = 0.0
        # When the last one started, and how long those take alone that started then.
        self._then_s: float | None = None
        self._started_s, self._num_started = 0.0, 0

    @property
    def slowdown(self) -> float:
        """How many times as long prompts take as they would alone, since decodes run beside them. Where several share
        an iteration it is less, but all of them wait for its end."""
        return max(self._took_s / self._alone_s, 1.0) if self._alone_s else 1.0

    def started(self, request: RoutedRequest, island: Island) -> None:
        if self._then_s is not None and island.now > self._then_s:
            self._took_s += island.now - self._then_s
            self._alone_s += self._started_s
            self._count += self._num_started
            if self._count > MEMORY:
                self._took_s, self._alone_s, self._count = (
                    self._took_s / 2,
                    self._alone_s / 2,
                    self._count / 2,
                )
            self._started_s = self._num_started = 0
        self._then_s = island.now
        self._started_s += _seconds(island, request.num_reusable, request.num_tokens)
        self._num_started += 1

    def waits(self, is_any: bool) -> None:
        """Whether some were left when there was no room for more: only then the next start says how fast they are."""
        if not is_any:
            self._then_s, self._started_s, self._num_started = None, 0.0, 0

    def first(self, island: Island) -> RoutedRequest | None:
        queue = island.prefill_queue
        found = queue.first(REAL_TIME, island.now)
        waiting = queue.soonest(REAL_TIME, MOST, island.now)
        if len(waiting) < 2 or found is not waiting[0]:
            return found
        waiting = sorted(waiting, key=_due_s)
        slowdown = self.slowdown
        num_ahead, _ = routing.ahead(island, True)
        begin_s = island.now + slowdown * _seconds(island, 0, num_ahead)
        jobs = (
            (_due_s(each), slowdown * _seconds(island, each.num_reusable, each.num_tokens))
            for each in waiting
        )
        kept = most_in_time(jobs, begin_s)
        return waiting[min(kept)] if kept else found


def _seconds(island: Island, num_cached: int, num_tokens: int) -> float:
    """The seconds of a prompt, if all instances compute it together."""
    return island.cluster.prefill_s(num_cached, num_tokens) / len(island.cluster.prefills)


def _due_s(request: RoutedRequest) -> float:
    return due_s(request.deadlines, request.num_output)
