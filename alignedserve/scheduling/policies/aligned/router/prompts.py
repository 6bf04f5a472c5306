"""Which prompts start, in which order, and on which prefill instance. Pure.

- **Order.** Each class goes by latest start: the smallest urgency goes first.
- **Savable.** While more real time (RT) waits than can be in time, the prompts start that let most of it be in time, at
  the pace at which prompts were seen to be computed.
- **How much best effort (BE).** While RT comes and goes, less BE is computed the more of it is ready for decode
  instances: where no BE prompt is computed, RT waits for none.
- **Place.** RT waits at a prefill instance for earlier RT and for the end of an iteration with BE, however much BE
  waits. So while RT comes and goes, BE is kept on as few instances as its windows of work allow: on the others RT waits
  for no BE at all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from alignedserve.scheduling import routing
from alignedserve.scheduling.forecast import FORGIVEN_S
from alignedserve.scheduling.island import Island, PrefillView, Room, RoutedRequest, Urgency
from alignedserve.scheduling.policies.priority import REAL_TIME
from alignedserve.timing.deadlines import due_s, latest_start_s

# Only the 256 most urgent prompts are considered: with the next ones the choice would take over a millisecond.
MAX_CONSIDERED = 256
# After every 16 measurements, those before count half as much.
NUM_MEASURED = 16
# A wait counts as at most this many times what was expected. A longer one means that instances stood still, not that
# they are slow.
MOST_OFF = 4.0
# The number of best-effort requests that are ready, per slot of the decode instances.
STOCK = 1.0

# Returns the number of prompt tokens that the instance is expected to find in its prefix cache.
NumKnown = Callable[[PrefillView], int]


# ---- order -----------------------------------------------------------------------------------------------------------


def urgency_of(request: RoutedRequest, island: Island) -> Urgency:
    deadlines, number, cluster = request.deadlines, request.num_output, island.cluster
    needed_s = cluster.prefill_s(request.num_reusable, request.num_tokens)
    if not request.is_rt:
        num_left = max(island.expected_output(request) - number, 0)
        needed_s += num_left * cluster.decode_s(request.num_tokens)
    start_s = latest_start_s(deadlines, number, needed_s, request.arrived_s)
    is_new = request.is_rt or not request.num_cached
    start_s += yields_s(request, island.now)
    # An answer that was begun is not left for others.
    is_begun = number > 0 or not is_new
    return Urgency(is_new, start_s, due_s(deadlines, number) < math.inf and not is_begun)


def yields_s(request: RoutedRequest, now: float) -> float:
    """Returns the seconds by which best effort whose answer exceeded its predicted length goes behind others (ALISE):
    until all of that will be forgiven. So it never waits for longer than others that come that much later."""
    return 0.0 if request.is_rt else request.demotion(now) * FORGIVEN_S


# ---- real time that can be in time -----------------------------------------------------------------------------------


class Savable:
    def __init__(self) -> None:
        # How long the last prompts took, one after the other, while others waited; and how long they take alone.
        self._took_s = self._alone_s = 0.0
        self._count = 0
        # When the window was last full while others waited; None: none has waited all the time since.
        self._full_s: float | None = None
        # How long the prompts that started since then take alone, and how often the queue had been empty then.
        self._since_full_s, self._num_emptied = 0.0, 0

    @property
    def slowdown(self) -> float:
        """How many times as long prompts take as they would alone, since decodes run beside them. Where several share
        an iteration it is less, but all of them wait for its end."""
        return max(self._took_s / self._alone_s, 1.0) if self._alone_s else 1.0

    def start(self, island: Island, room: Room, least: int) -> Iterator[RoutedRequest]:
        """Starts prompts while there is room, and `least` of them however little there is."""
        queue, now = island.prefill_queue, island.now
        chosen: Iterator[RoutedRequest] | None = None
        is_full = False
        if queue.num_emptied(REAL_TIME) != self._num_emptied:
            self._forget()
        try:
            while not queue.is_refused(REAL_TIME) and (first := queue.first(REAL_TIME, now)) is not None:
                is_full = not room.is_there and least <= 0
                if is_full:
                    break
                soonest = queue.soonest(REAL_TIME, 1, now)
                # A request without an objective, or a lost one, has its turn as the queue has it.
                request = first
                if soonest and soonest[0][0] is first:
                    chosen = iter(self._in_time(island)) if chosen is None else chosen
                    request = next(chosen, first)
                self._since_full_s += island.cluster.prefill_s(request.num_reusable, request.num_tokens)
                queue.take(request)
                room, least = room.less(request.num_missing, 1), least - 1
                yield request
        finally:
            self._num_emptied = queue.num_emptied(REAL_TIME)
            if is_full:
                if self._full_s is not None and self._since_full_s:
                    self._measure(now - self._full_s, self._since_full_s / len(island.cluster.prefills))
                if self._full_s is None or self._since_full_s:
                    self._full_s, self._since_full_s = now, 0.0
            elif queue.is_empty(REAL_TIME) or queue.is_refused(REAL_TIME):
                self._forget()

    def _forget(self) -> None:
        self._full_s, self._since_full_s = None, 0.0

    def _measure(self, seconds: float, alone_s: float) -> None:
        """Prompts that take `alone_s` had to be computed until those that take as long could start."""
        self._took_s += min(seconds, MOST_OFF * self.slowdown * alone_s)
        self._alone_s += alone_s
        self._count += 1
        if self._count >= NUM_MEASURED:
            self._took_s, self._alone_s, self._count = self._took_s / 2, self._alone_s / 2, 0

    def _in_time(self, island: Island) -> list[RoutedRequest]:
        """Returns as many prompts as can be in time together, the first to start first."""
        waiting = island.prefill_queue.soonest(REAL_TIME, MAX_CONSIDERED, island.now)
        jobs = [(due_s(request.deadlines, request.num_output), start_s) for request, start_s in waiting]
        in_order = sorted(range(len(jobs)), key=lambda number: jobs[number][0])
        share = self.slowdown / len(island.cluster.prefills)
        begin_s = island.now + self.ahead_s(island)
        chosen = most_in_time(
            ((jobs[number][0], share * (jobs[number][0] - jobs[number][1])) for number in in_order), begin_s
        )
        return [waiting[in_order[place]][0] for place in sorted(chosen)]

    def ahead_s(self, island: Island) -> float:
        """Returns the seconds until the prompts that were started are computed."""
        num_tokens, _ = routing.ahead(island, True)
        most = island.cluster.prefills[0].hello.limits.max_num_batched_tokens
        alone_s = num_tokens * island.cluster.prefill_s(0, most) / most
        return alone_s * self.slowdown / len(island.cluster.prefills)


def most_in_time(jobs: Iterable[tuple[float, float]], begin_s: float) -> set[int]:
    """Returns the numbers of the jobs to do; no other choice would let more of them end in time (Moore and Hodgson).

    Jobs are done one after the other from `begin_s` on. Each is given as (when it is due, its seconds), the soonest due
    first. They are taken up in order; whenever one would end too late, the longest so far is left out.
    """
    ends_s = begin_s
    # The longest is on top.
    chosen: list[tuple[float, int]] = []
    for number, (end_by_s, seconds) in enumerate(jobs):
        heapq.heappush(chosen, (-seconds, number))
        ends_s += seconds
        if ends_s > end_by_s:
            ends_s += heapq.heappop(chosen)[0]
    return {number for _, number in chosen}


# ---- best effort -----------------------------------------------------------------------------------------------------


def share_for_best_effort(island: Island) -> float:
    """Returns the share of the prefill instances that compute best effort: it is the smaller, the more decode instances
    have to choose from, or will have."""
    views = island.cluster.decodes
    most = STOCK * sum(view.hello.limits.max_num_seqs for view in views)
    num_there = sum(len(view.be_running) + len(view.be_promised) for view in views)
    num_ready = island.num_be - len(island.pinned) - num_there
    num_prefills = len(island.cluster.prefills)
    return math.ceil(num_prefills * (1 - num_ready / most)) / num_prefills if num_ready < most else 0.0


# ---- place -----------------------------------------------------------------------------------------------------------


def place_real_time(views: Sequence[PrefillView], num_known: NumKnown, is_colocated: bool) -> PrefillView:
    """Returns the instance where the prompt waits least; among colocated ones that are equal in this, the one where
    least decodes."""

    def wait(view: PrefillView) -> tuple[int, int, int]:
        num_be = view.pending.sum(is_rt=False)
        one_iteration = min(num_be, view.hello.limits.max_num_batched_tokens)
        num_before = view.pending.sum(is_rt=True) + one_iteration - num_known(view)
        return num_before, num_be, -view.num_free_blocks if is_colocated else 0

    return min(views, key=wait)


def place_best_effort(views: Sequence[PrefillView], num_iterations: int) -> PrefillView:
    """Each instance has a window of `num_iterations` iterations of work. One with room in its window takes more before
    another begins."""
    ahead = [view.pending.sum(is_rt=False) for view in views]

    def place(number: int) -> tuple[bool, int]:
        window = num_iterations * views[number].hello.limits.max_num_batched_tokens
        is_full = ahead[number] >= window
        return is_full, ahead[number] if is_full else -ahead[number]

    return views[min(range(len(views)), key=place)]
