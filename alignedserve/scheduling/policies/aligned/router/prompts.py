"""Decides which prompts start, in which order, and on which prefill instance. Pure.

- **Order.** Each class is ordered by latest start: the smallest urgency goes first.
- **Savable.** When not all waiting real time (RT) can be in time, the router starts the prompts that let the most of it
  be, at the measured pace of prompts. The second token should be in time as well. Others start where an instance has no
  prompt, and when they are lost, by turns.
- **The share of best effort (BE).** With recent RT, fewer instances compute BE as more of it becomes ready for the
  decode instances. RT never waits for BE where no BE prompt is computed.
- **Place.** RT waits at a prefill instance for earlier RT, and for the end of an iteration with BE, however much BE
  waits there. With recent RT, BE is therefore kept on as few instances as its windows of work allow. RT on the others
  does not wait for BE at all.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from alignedserve.scheduling import routing
from alignedserve.scheduling.forecast import FORGIVEN_S
from alignedserve.scheduling.island import Island, PrefillView, Room, RoutedRequest, Urgency
from alignedserve.scheduling.prefixes import num_to_compute
from alignedserve.scheduling.routing import REAL_TIME
from alignedserve.timing.deadlines import due_s, latest_start_s
from alignedserve.types import RequestKey

# The number of prompts that are considered, most urgent first. With more the choice takes over a millisecond.
MAX_CONSIDERED = 256
# The number of measurements after which all earlier ones count half. Neither half nor twice of it is better in four
# scenarios, nor of NUM_AVERAGED (benchmarks.arena.sweep).
NUM_MEASURED = 16
# The number of started prompts with a first token that is compared with its prediction. Each event looks at all.
MAX_EXPECTED = 64
# The weight of a prediction error in their average falls by a factor of e after this many more.
NUM_AVERAGED = 16
# Clamp of a measured wait, as a multiple of the expected one. A longer wait means that instances stood still.
MOST_OFF = 4.0
# Ready BE requests per slot of the decode instances at which no more BE prompts start. At 1, they can fill all slots.
STOCK = 1.0

# Returns the number of prompt tokens that the instance is expected to find in its prefix cache.
NumKnown = Callable[[PrefillView], int]


# ---- order -----------------------------------------------------------------------------------------------------------


def urgency_of(request: RoutedRequest, island: Island) -> Urgency:
    deadlines, number, cluster = request.deadlines, request.num_output, island.cluster
    needed_s = prefill_s(request, island)
    if not request.is_rt:
        num_left = max(island.expected_output(request) - number, 0)
        needed_s += num_left * cluster.decode_s(request.num_tokens)
    start_s = latest_start_s(deadlines, number, needed_s, request.arrived_s)
    is_new = request.is_rt or request.num_cached <= request.num_found
    start_s += yields_s(request, island.now)
    # An answer that has begun does not give way to others.
    is_begun = number > 0 or not is_new
    return Urgency(is_new, start_s, due_s(deadlines, number) < math.inf and not is_begun)


def prefill_s(request: RoutedRequest, island: Island) -> float:
    """Returns the seconds that the prompt takes alone, without what a prefix cache may hold of it."""
    num_known = island.num_known(request)
    num_new = num_to_compute(request.num_tokens - request.num_reusable, num_known)
    # What an iteration costs in any case is in the seconds of the first tokens.
    fixed_s = island.cluster.prefill_s(0, 1) if num_known else 0.0
    return fixed_s + island.cluster.prefill_s(request.num_tokens - num_new, request.num_tokens)


def yields_s(request: RoutedRequest, now: float) -> float:
    """Returns the seconds by which a BE request is ordered later because its answer exceeded its predicted length
    (ALISE): the time until its demotion is forgiven. Only requests that arrive within that time overtake it."""
    return 0.0 if request.is_rt else request.demotion(now) * FORGIVEN_S


# ---- RT that can be in time ------------------------------------------------------------------------------------------


class Savable:
    """Starts RT prompts, and measures their pace while others wait, and the error of its predictions."""

    def __init__(self) -> None:
        # The seconds that recent prompts took one after the other, while others waited, and their predicted seconds
        # alone.
        self._took_s = self._alone_s = 0.0
        self._count = 0
        # When the window was last full while prompts waited; None if the queue was empty or refused since.
        self._full_s: float | None = None
        # The predicted seconds alone of the prompts started since then, and `num_emptied` of the queue at that time.
        self._since_full_s, self._num_emptied = 0.0, 0
        # The last prompts that were started, when that was, and the expected seconds until their first tokens.
        self._expected: dict[RequestKey, tuple[RoutedRequest, float, float]] = {}
        # The seconds by which first tokens came later than expected, on average.
        self._error_s = 0.0

    @property
    def slowdown(self) -> float:
        """Seconds that prompts take, as a multiple of those they would take alone: decodes run beside them. At
        least 1. Prompts that share an iteration take less each, but all of them wait for its end."""
        return max(self._took_s / self._alone_s, 1.0) if self._alone_s else 1.0

    def start(self, island: Island, room: Room, least: int) -> Iterator[RoutedRequest]:
        """Takes prompts from the queue while there is room, and at least `least` of them, and yields them. Beyond those
        it takes none that can't be in time but is not lost yet: it would only make the next ones late."""
        queue, now = island.prefill_queue, island.now
        self._learn_error()
        chosen: Iterator[RoutedRequest] | None = None
        # The owner of the chosen ones. The queue shows one owner at a time.
        owner = ""
        is_full = False
        if queue.num_emptied(REAL_TIME) != self._num_emptied:
            self.forget()
        try:
            while not queue.is_refused(REAL_TIME) and (first := queue.first(REAL_TIME, now)) is not None:
                is_full = not room.is_there and least <= 0
                if is_full:
                    break
                soonest = queue.soonest(REAL_TIME, 1, now)
                # Requests without an objective and lost ones keep the queue's order.
                request = first
                if soonest and soonest[0][0] is first:
                    if chosen is None or first.owner != owner:
                        chosen, owner = iter(self._in_time(island)), first.owner
                    fitting = next(chosen, None)
                    if fitting is None and least <= 0:
                        # The router holds prompts back, so the time until the window is full shows no pace.
                        self.forget()
                        break
                    request = fitting or first
                alone_s = prefill_s(request, island)
                self._since_full_s += alone_s
                if soonest and not request.num_output:
                    self._expect(request, now, self.ahead_s(island) + self._share(island) * alone_s)
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
                self.forget()

    def forget(self) -> None:
        """Begins to measure anew: the window is not full, or is kept closed."""
        self._full_s, self._since_full_s = None, 0.0

    def _measure(self, seconds: float, alone_s: float) -> None:
        """Adds a measurement: prompts of `alone_s` seconds of work could start within `seconds`, so that as much work
        was completed in that time."""
        self._took_s += min(seconds, MOST_OFF * self.slowdown * alone_s)
        self._alone_s += alone_s
        self._count += 1
        if self._count >= NUM_MEASURED:
            self._took_s, self._alone_s, self._count = self._took_s / 2, self._alone_s / 2, 0

    def _learn_error(self) -> None:
        for request, started_s, wait_s in [each for each in self._expected.values() if each[0].num_output]:
            del self._expected[request.key]
            took_s = request.deadlines.first_due_s - started_s
            self._error_s += (min(took_s, MOST_OFF * wait_s) - wait_s - self._error_s) / NUM_AVERAGED

    def _expect(self, request: RoutedRequest, now: float, wait_s: float) -> None:
        self._expected.pop(request.key, None)
        if len(self._expected) == MAX_EXPECTED:
            del self._expected[next(iter(self._expected))]
        self._expected[request.key] = request, now, wait_s

    def _share(self, island: Island) -> float:
        """Returns the seconds after which the next prompt can start, as a multiple of those that one takes alone."""
        return self.slowdown / len(island.cluster.prefills)

    def _in_time(self, island: Island) -> list[RoutedRequest]:
        """Returns the largest set of prompts that can be in time together, the most urgent first."""
        waiting = island.prefill_queue.soonest(REAL_TIME, MAX_CONSIDERED, island.now)
        share = self._share(island)
        second_token_s = 0.0 if island.cluster.is_colocated else island.cluster.second_token_s
        jobs: list[tuple[float, float, int]] = []
        for number, (request, start_s) in enumerate(waiting):
            deadlines = request.deadlines
            first_due_s = due_s(deadlines, request.num_output)
            # The second token is due `tbt_s` after the first.
            end_by_s = first_due_s - max(second_token_s - deadlines.tbt_s, 0.0)
            jobs.append((end_by_s, share * (first_due_s - start_s), number))
        jobs.sort()
        begin_s = island.now + self.ahead_s(island) + max(self._error_s, 0.0)
        chosen = most_in_time(((end_by_s, seconds) for end_by_s, seconds, _ in jobs), begin_s)
        return [waiting[jobs[place][2]][0] for place in sorted(chosen)]

    def ahead_s(self, island: Island) -> float:
        """Returns the seconds until all started RT prompts are computed."""
        num_tokens, _ = routing.ahead(island, True)
        most = island.cluster.prefills[0].hello.limits.max_num_batched_tokens
        alone_s = num_tokens * island.cluster.prefill_s(0, most) / most
        return alone_s * self.slowdown / len(island.cluster.prefills)


def most_in_time(jobs: Iterable[tuple[float, float]], begin_s: float) -> set[int]:
    """Returns the indices of a largest set of jobs that all end in time (Moore and Hodgson).

    Each job is a pair: when it is due, and how many seconds it takes. Jobs are sorted by due time, and run one after
    the other from `begin_s` on. Adds them in order, and drops the longest so far whenever one would end too late.
    """
    ends_s = begin_s
    # Pairs of negated seconds and index: the longest job is on top.
    chosen: list[tuple[float, int]] = []
    for number, (end_by_s, seconds) in enumerate(jobs):
        heapq.heappush(chosen, (-seconds, number))
        ends_s += seconds
        if ends_s > end_by_s:
            ends_s += heapq.heappop(chosen)[0]
    return {number for _, number in chosen}


# ---- the share of BE -------------------------------------------------------------------------------------------------


def share_for_best_effort(island: Island) -> float:
    """Returns the share of the prefill instances that compute BE. It shrinks as more BE requests are ready for the
    decode instances, or started; it is 0 from STOCK of them per slot on."""
    views = island.cluster.decodes
    most = STOCK * sum(view.hello.limits.max_num_seqs for view in views)
    num_there = sum(len(view.be_running) + len(view.be_promised) for view in views)
    num_ready = island.num_be - len(island.pinned) - num_there
    num_prefills = len(island.cluster.prefills)
    return math.ceil(num_prefills * (1 - num_ready / most)) / num_prefills if num_ready < most else 0.0


# ---- place -----------------------------------------------------------------------------------------------------------


def place_real_time(views: Sequence[PrefillView], num_known: NumKnown, is_colocated: bool) -> PrefillView:
    """Returns the instance with the least work before the prompt. Among equal ones, takes the one with the least BE
    queued; among colocated ones, then the one with the most free blocks."""

    def wait(view: PrefillView) -> tuple[int, int, int]:
        num_be = view.pending.sum(is_rt=False)
        one_iteration = min(num_be, view.hello.limits.max_num_batched_tokens)
        num_before = view.pending.sum(is_rt=True) + one_iteration - num_known(view)
        return num_before, num_be, -view.num_free_blocks if is_colocated else 0

    return min(views, key=wait)


def place_best_effort(views: Sequence[PrefillView], num_iterations: int) -> PrefillView:
    """Returns the instance for a BE prompt, so that as few instances as possible compute BE. Each has a window of
    `num_iterations` iterations of BE work, and fills it before the next one begins."""
    ahead = [view.pending.sum(is_rt=False) for view in views]

    def place(number: int) -> tuple[bool, int]:
        window = num_iterations * views[number].hello.limits.max_num_batched_tokens
        is_full = ahead[number] >= window
        return is_full, ahead[number] if is_full else -ahead[number]

    return views[min(range(len(views)), key=place)]
