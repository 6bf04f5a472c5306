"""Which prompts of real time start: while more wait than can be in time, those that let most of them be. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.scheduling import routing
from alignedserve.scheduling.island import Island, Room, RoutedRequest
from alignedserve.scheduling.policies.aligned.most_in_time import most_in_time
from alignedserve.scheduling.policies.priority import REAL_TIME
from alignedserve.timing.deadlines import due_s

# Only this many of the prompts that wait are considered, the most urgent ones.
MOST = 256
# After every so many prompts, what was measured before counts half as much.
MEMORY = 16
# A wait counts as at most this many times what was expected. A longer one means that instances stood still, not that
# they are slow.
MOST_OFF = 4.0


class Savable:
    def __init__(self) -> None:
        # How long the last prompts took, one after the other, while others waited; and how long they take alone.
        self._took_s = self._alone_s = 0.0
        self._count = 0
        # Since when others have waited; None: none does. When the last ones started, and how long these take alone.
        self._since_s: float | None = None
        self._then_s = self._started_s = 0.0

    @property
    def slowdown(self) -> float:
        """How many times as long prompts take as they would alone, since decodes run beside them. Where several share
        an iteration it is less, but all of them wait for its end."""
        return max(self._took_s / self._alone_s, 1.0) if self._alone_s else 1.0

    def start(self, island: Island, room: Room, least: int) -> Iterator[RoutedRequest]:
        """Starts prompts while there is room, and `least` of them however little there is."""
        queue = island.prefill_queue
        chosen: Iterator[RoutedRequest] | None = None
        try:
            while (room.is_there or least > 0) and not queue.is_refused(REAL_TIME):
                first = queue.first(REAL_TIME, island.now)
                if first is None:
                    break
                soonest = queue.soonest(REAL_TIME, 1, island.now)
                # Others are those that asked for no objective, or have lost theirs: they have their turn.
                request = first
                if soonest and soonest[0][0] is first:
                    chosen = iter(self._in_time(island)) if chosen is None else chosen
                    request = next(chosen, first)
                queue.take(request)
                room, least = room.less(request.num_missing, 1), least - 1
                self._started(request, island)
                yield request
        finally:
            if queue.is_empty(REAL_TIME) or queue.is_refused(REAL_TIME):
                self._since_s = None

    def _started(self, request: RoutedRequest, island: Island) -> None:
        now = island.now
        if self._since_s is None:
            self._since_s = self._then_s = now
            self._started_s = 0.0
        if now == self._since_s:
            # These fill the window: the next one starts before they are computed.
            return
        if now > self._then_s:
            most_s = MOST_OFF * self.slowdown * self._started_s
            self._took_s += min(now - self._then_s, most_s)
            self._alone_s += self._started_s
            self._started_s = 0.0
            if self._count >= MEMORY:
                self._took_s, self._alone_s, self._count = self._took_s / 2, self._alone_s / 2, 0
        self._then_s = now
        needed_s = island.cluster.prefill_s(request.num_reusable, request.num_tokens)
        self._started_s += needed_s / len(island.cluster.prefills)
        self._count += 1

    def _in_time(self, island: Island) -> list[RoutedRequest]:
        """Of those that can be in time, the largest number that can be together, the first to start first."""
        waiting = island.prefill_queue.soonest(REAL_TIME, MOST, island.now)
        jobs = [(due_s(request.deadlines, request.num_output), start_s) for request, start_s in waiting]
        in_order = sorted(range(len(jobs)), key=lambda number: jobs[number][0])
        share = self.slowdown / len(island.cluster.prefills)
        begin_s = island.now + share * self._ahead_s(island)
        chosen = most_in_time(
            ((jobs[number][0], share * (jobs[number][0] - jobs[number][1])) for number in in_order), begin_s
        )
        return [waiting[in_order[place]][0] for place in sorted(chosen)]

    @staticmethod
    def _ahead_s(island: Island) -> float:
        """How long the prompts that were started and are not computed take an instance."""
        num_tokens, _ = routing.ahead(island, True)
        most = island.cluster.prefills[0].hello.limits.max_num_batched_tokens
        return num_tokens * island.cluster.prefill_s(0, most) / most
