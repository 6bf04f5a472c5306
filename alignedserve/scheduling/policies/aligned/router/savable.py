"""Which prompts of real time start: while more wait than can be in time, those that let most of them be. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.scheduling import routing
from alignedserve.scheduling.island import Island, Room, RoutedRequest
from alignedserve.scheduling.policies.aligned.most_in_time import most_in_time
from alignedserve.scheduling.policies.priority import REAL_TIME
from alignedserve.timing.deadlines import due_s

# Only the 256 most urgent prompts are considered: with the next ones the choice would take over a millisecond.
MOST = 256
# After every 16 measurements, those before count half as much.
MEMORY = 16
# A wait counts as at most this many times what was expected. A longer one means that instances stood still, not that
# they are slow.
MOST_OFF = 4.0


class Savable:
    def __init__(self) -> None:
        # How long the last prompts took, one after the other, while others waited; and how long they take alone.
        self._took_s = self._alone_s = 0.0
        self._count = 0
        # When the window was last filled while others waited; None: it is not full, or none waits.
        self._full_s: float | None = None

    @property
    def slowdown(self) -> float:
        """How many times as long prompts take as they would alone, since decodes run beside them. Where several share
        an iteration it is less, but all of them wait for its end."""
        return max(self._took_s / self._alone_s, 1.0) if self._alone_s else 1.0

    def start(self, island: Island, room: Room, least: int) -> Iterator[RoutedRequest]:
        """Starts prompts while there is room, and `least` of them however little there is."""
        queue, now = island.prefill_queue, island.now
        chosen: Iterator[RoutedRequest] | None = None
        is_full, has_waited, alone_s = False, True, 0.0
        try:
            while not queue.is_refused(REAL_TIME) and (first := queue.first(REAL_TIME, now)) is not None:
                is_full = not room.is_there and least <= 0
                if is_full:
                    break
                # Otherwise the queue was empty for a while.
                has_waited = has_waited and (bool(alone_s) or first.arrived_s <= (self._full_s or 0.0))
                soonest = queue.soonest(REAL_TIME, 1, now)
                # A request without an objective, or a lost one, has its turn as the queue has it.
                request = first
                if soonest and soonest[0][0] is first:
                    chosen = iter(self._in_time(island)) if chosen is None else chosen
                    request = next(chosen, first)
                alone_s += island.cluster.prefill_s(request.num_reusable, request.num_tokens)
                queue.take(request)
                room, least = room.less(request.num_missing, 1), least - 1
                yield request
        finally:
            if not is_full:
                self._full_s = None
            elif alone_s or self._full_s is None:
                if self._full_s is not None and has_waited:
                    self._measure(now - self._full_s, alone_s / len(island.cluster.prefills))
                self._full_s = now

    def _measure(self, seconds: float, alone_s: float) -> None:
        """Prompts that take `alone_s` had to be computed until those that take as long could start."""
        self._took_s += min(seconds, MOST_OFF * self.slowdown * alone_s)
        self._alone_s += alone_s
        self._count += 1
        if self._count >= MEMORY:
            self._took_s, self._alone_s, self._count = self._took_s / 2, self._alone_s / 2, 0

    def _in_time(self, island: Island) -> list[RoutedRequest]:
        """Returns as many prompts as can be in time together, the first to start first."""
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
