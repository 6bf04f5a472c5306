"""The router's part of `aligned`.

- **Prompts** (`prompts.py`). Real time (RT) and best effort (BE) have a line each, ordered by latest start. RT waits
  for blocks in the pool, and for the RT before it. When not all RT prompts can be in time, the router starts those that
  let the most be. BE has a window of its own, because instances give it what RT leaves of each iteration. With recent
  RT, that window shrinks as more BE becomes ready for the decode instances, and covers as few prefill instances as
  possible.
- **Decode** (`batches.py`). The pool's quad-tree finds batches of requests of similar prefix length. RT beside BE takes
  the **RT fast path** instead. It is announced to a decode instance while its prompt is computed, and goes there at
  once afterwards if BE can make room for it. While some RT that waits is lost, all RT is assigned in that order, and no
  batches are formed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, islice, takewhile

from alignedserve.protocol.messages import FindNear, FormBatch, Hello
from alignedserve.scheduling import routing
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import (
    Assign,
    ClusterState,
    DecodeView,
    Island,
    PrefillView,
    RoutedRequest,
    Urgency,
)
from alignedserve.scheduling.policies.aligned.router import batches, prompts
from alignedserve.scheduling.policies.aligned.router.prompts import MOST_OFF, Savable, urgency_of, yields_s
from alignedserve.scheduling.policies.aligned.rt_beside_be import ENOUGH, LATE, nums_for_pace
from alignedserve.scheduling.policy import RouterPart
from alignedserve.scheduling.routing import BEST_EFFORT, REAL_TIME
from alignedserve.timing.deadlines import DEMOTION_S
from alignedserve.timing.sliding import SlidingMinimum
from alignedserve.types import InstanceId, RequestKey

# The number of BE requests evicted from colocated instances that are sorted in one event.
MAX_SORTED = 256
# The number of waiting RT requests that are considered for the RT fast path in one event.
MAX_FAST = 256
# The number of waiting RT requests of which one may be late. Others may have an objective that can't be kept.
MAX_JUDGED = 64
# Requests that fit nowhere, after which only smaller ones are tried.
MAX_UNFIT = 16
# The iterations until a request that is assigned gets its next token, before any are measured: the present one, one in
# which its KV arrives, and its own.
ITERATIONS_TO_RUN = 3.0
# The number of last measurements per instance, and the share of them that the lead time covers. Those due first are
# assigned first, so with a mean, half of them would be late.
NUM_LEADS, IN_TIME = 16, 0.9
# The number of assigned requests without a next token that are measured. Each event looks at all.
MAX_AWAITED = 64
# Others that are assigned per lost request, and their tokens per token of it. Lost ones get about 5 %, as BE does by
# default (`be_share`).
OTHERS_PER_LOST = 20


class AlignedRouter(RouterPart):
    num_lines = 2

    def __init__(self, config: SchedulingConfig) -> None:
        super().__init__(config)
        # Has a value if RT arrived within the sliding window.
        self._real_time = SlidingMinimum()
        # The TBT objectives of recent RT, in seconds.
        self._objectives = SlidingMinimum()
        self._savable = Savable()
        # See `_share_for_pace`, and the instance for which it was computed.
        self._pace_share = 1.0
        self._paced: Hello | None = None
        # See `_keep_for_return`.
        self._kept: InstanceId | None = None
        self._turns = LostTurns()
        self._lead = LeadTime()
        # Whether no batches are formed, because some RT is late.
        self._is_late = False
        self._likeness = batches.Likeness()

    # ---- prompts -----------------------------------------------------------------------------------------------------

    def line(self, is_rt: bool) -> int:
        return REAL_TIME if is_rt else BEST_EFFORT

    def urgency(self, request: RoutedRequest, island: Island) -> Urgency:
        return urgency_of(request, island)

    def start(self, island: Island) -> Iterator[RoutedRequest]:
        self._kept = None
        share, queue = self._share_for_be(island), island.prefill_queue
        if not queue.is_empty(REAL_TIME):
            yield from self._start_real_time(island)
        if share == 0 or queue.is_empty(BEST_EFFORT) or routing.has_evicted(island):
            return
        room = routing.window(island.cluster, self.config.prefill_window * share)
        room = room.less(*routing.ahead(island, False))
        # Pinned requests hold pool blocks. Another owner's request may wait for those blocks, so pinned ones start
        # without their owner's turn.
        for request in [*island.pinned] if queue.owners_compete else ():
            if room.is_there and not queue.is_refused(BEST_EFFORT):
                queue.take(request)
                room = room.less(request.num_missing, 1)
                yield request
        yield from routing.start_line(
            island, BEST_EFFORT, room, lambda request: self._may_start(request, island)
        )

    def _start_real_time(self, island: Island) -> Iterator[RoutedRequest]:
        views = island.cluster.prefills
        kept = self._keep_for_return(island)
        num_open = len(views) - (kept is not None)
        if not num_open:
            self._savable.forget()
            return
        window = routing.window(island.cluster, self._num_iterations(island) * num_open / len(views))
        # Each instance gets an RT prompt, even beyond the window.
        num_idle = sum(not view.pending.sum(is_rt=True) for view in views if view.instance_id != kept)
        least = num_idle - island.reserving.count(is_rt=True)
        yield from self._savable.start(island, window.less(*routing.ahead(island, True)), least)

    def _keep_for_return(self, island: Island) -> InstanceId | None:
        """Returns the colocated instance that no RT prompts are started at, because RT that was evicted is due before
        the started prompts are computed; None if there is none. Prompts would take the blocks that it needs. A stream
        that is lost waits for DEMOTION_S first."""
        if not island.cluster.is_colocated:
            return None
        now = island.now
        soonest = island.decode_queue.soonest(MAX_FAST, now)
        if first := min((each for each in soonest if not _may_wait(each, now)), key=_due_s, default=None):
            # A boundary each until it is offered and until it runs.
            needed_s = self._savable.ahead_s(island) + 2 * island.cluster.decode_s(first.num_tokens)
            if _due_s(first) - now < needed_s:
                best = max(island.cluster.decodes, key=lambda view: view.num_available_blocks)
                self._kept = best.instance_id
        return self._kept

    def _num_iterations(self, island: Island) -> float:
        """Returns how much RT is started ahead, in iterations full of prompts. What is started can't be chosen again.

        After the first iteration, which may be full, each of the window holds enough for nearly the full pace. On
        colocated instances iterations are about as long as the TBT objective, and prompts get a part of each.
        """
        num_iterations, cluster = self.config.prefill_window, island.cluster
        if not cluster.is_colocated:
            return 1 + (num_iterations - 1) * self._share_for_pace(cluster)
        full_s = cluster.prefill_s(0, cluster.prefills[0].hello.limits.max_num_batched_tokens)
        # The same bound as in `DecodeSloScheduler.bound_of_prompts_s`.
        bound_s = max(self._objectives.value(math.inf, island.now), LATE * cluster.decode_s(1))
        share = bound_s / full_s if bound_s < full_s else 1.0
        return num_iterations * share / min(self._savable.slowdown, MOST_OFF)

    def _share_for_pace(self, cluster: ClusterState) -> float:
        """Returns how full an iteration is that has ENOUGH of the pace of prompts."""
        hello = cluster.prefills[0].hello
        if hello.cost and self._paced is not hello:
            (count,) = nums_for_pace(hello.limits, lambda count: cluster.prefill_s(0, count), ENOUGH)
            self._paced, self._pace_share = hello, count / hello.limits.max_num_batched_tokens
        return self._pace_share

    def _may_start(self, request: RoutedRequest, island: Island) -> bool:
        """Returns whether a BE prompt may start. While RT waits for blocks in the pool, BE gets no more than its own
        share of them."""
        share = 0.0 if island.prefill_queue.is_refused(REAL_TIME) else 1 - self.config.rt_headroom
        # Computed again for each prompt, because those started in this event count as well.
        is_wanted = self._share_for_be(island) > 0
        return is_wanted and island.has_room_for(request, self.config.be_share, share)

    def _share_for_be(self, island: Island) -> float:
        return prompts.share_for_best_effort(island) if self._is_rt_known(island.now) else 1.0

    def _is_rt_known(self, now: float) -> bool:
        return self._real_time.value(math.inf, now) < math.inf

    def place(
        self,
        request: RoutedRequest,
        views: Sequence[PrefillView],
        num_known: Callable[[PrefillView], int],
        island: Island,
    ) -> PrefillView:
        if request.is_rt:
            self._real_time.add(0.0, island.now)
            self._objectives.add(request.deadlines.tbt_s, island.now)
            others = [view for view in views if view.instance_id != self._kept]
            return prompts.place_real_time(others or views, num_known, island.cluster.is_colocated)
        if self._is_rt_known(island.now) and not island.cluster.is_colocated:
            return prompts.place_best_effort(views, self.config.prefill_window)
        return super().place(request, views, num_known, island)

    def pins(self, request: RoutedRequest) -> bool:
        """Returns True for BE, which counts as under way and goes first within its class."""
        return not request.is_rt

    # ---- pooled requests ---------------------------------------------------------------------------------------------

    def expect_at(self, request: RoutedRequest, island: Island) -> DecodeView | None:
        is_apart = not island.cluster.is_colocated
        is_told = is_apart and self._takes_fast_path(request, island)
        return _least_real_time(request, island.cluster.decodes) if is_told else None

    def admission_due_s(self, request: RoutedRequest, island: Island) -> float:
        """Returns when a pooled request should be admitted at the latest.

        Beside BE, and after an eviction, an RT request is due with its next token. Other RT is served best by batches
        of similar length, so that only starving requests go first. BE with an answer beyond its predicted length is due
        later: batches begin with other due requests before it.
        """
        starves_s = super().admission_due_s(request, island)
        is_evicted_rt = request.is_rt and request.num_output > 1
        if not (is_evicted_rt or self._takes_fast_path(request, island)):
            return starves_s + yields_s(request, island.now)
        return min(starves_s, _due_s(request))

    @staticmethod
    def _takes_fast_path(request: RoutedRequest, island: Island) -> bool:
        """Returns whether the request is RT, and BE is present that can make room for it."""
        return request.is_rt and island.num_be > 0

    def hand_over_to(
        self, request: RoutedRequest, views: Sequence[DecodeView], island: Island
    ) -> DecodeView | None:
        """Returns the decode instance that takes the request directly; None: it goes through the pool.

        Beside BE this is the RT fast path. RT alone goes through the pool while any request waits there for a batch.
        """
        if not self._takes_fast_path(request, island):
            return super().hand_over_to(request, views, island)
        if waits_in_time(island, self._lead):
            return None
        # An instance may be kept for a lost request of which it is the turn.
        lost = self._turns.next if self._is_late and island.decode_queue.real_time else None
        assigns = _assign_fast_path([lost, request] if lost else [request], views, lost)
        chosen = [each.decode for each in assigns if request in each.requests]
        if chosen and island.decode_queue.real_time:
            self._turns.took(request)
        return next((view for view in views if view.instance_id in chosen), None)

    def decide(self, island: Island) -> Iterator[FormBatch | FindNear | Assign]:
        self._is_late = False
        self._lead.learn(island.now)
        if not len(island.decode_queue):
            return
        when = _judged_at(island, self._lead)
        self._is_late = not island.cluster.is_colocated and _is_any_late(island, when)
        if (island.num_be or self._is_late) and island.decode_queue.real_time:
            assigns = self._fast_path(island, when)
            self._lead.note(assigns, island)
            yield from self._turns.note(assigns)
        if self._is_late:
            yield from batches.offer_one_each(island, self.config)
        elif island.cluster.is_colocated:
            # Only evicted requests wait here. Prompts run beside decodes, so batches of similar length gain nothing.
            in_order = _in_order_of_return(island, self._turns)
            yield from self._turns.note(routing.assign_in_order(in_order, island.cluster.decodes))
        elif (is_rt_known := self._is_rt_known(island.now)) or self._likeness.pays(island):
            yield from batches.decide(island, self.config, is_rt_known)
        else:
            yield from batches.assign(island)

    def _fast_path(self, island: Island, when: float) -> list[Assign]:
        # Without BE, others would be admitted before a candidate batch for as long as some are lost.
        views = [view for view in island.cluster.decodes if island.num_be or not view.batch]
        if not any(view.num_slots_for_rt > 0 for view in views):
            return []
        waiting = self._turns.in_order(island.decode_queue.soonest(MAX_FAST, when), when)
        # Batches would take the room of an instance that is kept.
        assigns = _assign_fast_path(waiting, views, self._turns.next if self._is_late else None)
        # Without BE, all are staged like any others.
        return assigns if island.num_be else [replace(each, is_urgent=False) for each in assigns]


def _in_order_of_return(island: Island, turns: LostTurns) -> Iterable[RoutedRequest]:
    """Returns RT, the soonest due first and lost ones last, then BE in order of demotion: answers beyond their
    predicted length go last."""
    queue, now = island.decode_queue, island.now
    best_effort = (request for request in queue if not request.is_rt)
    first = sorted(islice(best_effort, MAX_SORTED), key=lambda request: request.demotion(now))
    return chain(turns.in_order(queue.soonest(MAX_SORTED, now), now), first, best_effort)


# ---- RT fast path ----------------------------------------------------------------------------------------------------


class LostTurns:
    """Lets a lost request go first after OTHERS_PER_LOST that are not, with as many times its tokens. Otherwise it
    would never run under lasting overload."""

    def __init__(self) -> None:
        self._num_others = self._num_tokens = 0
        # The first lost request. Only its turn counts: it may be too large for room that others take.
        self._first: RoutedRequest | None = None
        # The owner of the requests that were last put in order, and both counts of the others.
        self._owner: str | None = None
        self._counts_of: dict[str, tuple[int, int]] = {}

    @property
    def next(self) -> RoutedRequest | None:
        """The lost request that goes first now; None if it is not the turn of any."""
        first, num_others = self._first, self._num_others
        if (
            first is None
            or num_others < OTHERS_PER_LOST
            or self._num_tokens < OTHERS_PER_LOST * first.num_tokens
        ):
            return None
        return first

    def in_order(self, requests: Sequence[RoutedRequest], now: float) -> Sequence[RoutedRequest]:
        """Returns the requests. If it is the turn of lost ones, the first of them goes first."""
        if requests:
            self._turn_to(requests[0].owner)
        self._first = next((each for each in requests if is_lost(each, now)), None)
        # Others count while one waits for its turn.
        self._num_others = min(self._num_others, OTHERS_PER_LOST) if self._first else 0
        self._num_tokens = (
            min(self._num_tokens, OTHERS_PER_LOST * self._first.num_tokens) if self._first else 0
        )
        if self.next is None:
            return requests
        return sorted(requests, key=lambda each: each is not self._first)

    def _turn_to(self, owner: str) -> None:
        """Continues with the counts of this owner. Each call has requests of one."""
        if self._owner not in (None, owner):
            if self._num_others:
                self._counts_of[self._owner] = self._num_others, self._num_tokens
            self._num_others, self._num_tokens = self._counts_of.pop(owner, (0, 0))
        self._owner = owner

    def note(self, assigns: Iterable[Assign]) -> Iterator[Assign]:
        """Yields what is assigned, and counts its real-time requests and their tokens."""
        for assign in assigns:
            for request in assign.requests:
                self.took(request)
            yield assign

    def took(self, request: RoutedRequest) -> None:
        if request is self._first:
            self._num_others = self._num_tokens = 0
        elif request.is_rt:
            self._num_others += 1
            self._num_tokens += request.num_tokens


class LeadTime:
    """Measures how many iterations pass at each instance from the assignment of a request to its next token. The fast
    path alone is measured: what waits in a candidate batch waits for others."""

    def __init__(self) -> None:
        self._last: dict[InstanceId, deque[float]] = {}
        # What is awaited: a request, its number of tokens when it was assigned, when and where that was, and the
        # seconds of an iteration there.
        self._awaited: dict[RequestKey, tuple[RoutedRequest, int, float, InstanceId, float]] = {}

    def seconds(self, island: Island) -> float:
        """Returns the seconds until a request that is assigned now has its next token: the longest of all instances
        with room, or of all that run requests if none has room."""
        running = [*_durations(island)]
        with_room = [
            each for each in running if each[0].num_slots_for_rt > 0 and each[0].num_blocks_for_rt > 0
        ]
        leads = (self._iterations(view) * duration_s for view, duration_s in with_room or running)
        return max(leads, default=0.0)

    def _iterations(self, view: DecodeView) -> float:
        return _usual(last) if (last := self._last.get(view.instance_id)) else ITERATIONS_TO_RUN

    def note(self, assigns: Iterable[Assign], island: Island) -> None:
        """Notes what is assigned."""
        durations_s = {view.instance_id: duration_s for view, duration_s in _durations(island)}
        for name, request in ((each.decode, request) for each in assigns for request in each.requests):
            self._awaited.pop(request.key, None)
            if len(self._awaited) == MAX_AWAITED:
                del self._awaited[next(iter(self._awaited))]
            if name in durations_s:
                self._awaited[request.key] = request, request.num_output, island.now, name, durations_s[name]

    def learn(self, now: float) -> None:
        """Called at each event, so that tokens are seen when they come."""
        for request, num_output, since_s, name, iteration_s in [*self._awaited.values()]:
            if request.num_output > num_output:
                del self._awaited[request.key]
                last = self._last.setdefault(name, deque([ITERATIONS_TO_RUN] * NUM_LEADS, NUM_LEADS))
                # A request that has left the instance meanwhile takes much longer.
                last.append(min((now - since_s) / iteration_s, MOST_OFF * _usual(last)))


def _usual(last: Iterable[float]) -> float:
    return sorted(last)[int(IN_TIME * (NUM_LEADS - 1))]


def _durations(island: Island) -> Iterator[tuple[DecodeView, float]]:
    """Yields the decode instances that run requests, each with the seconds of its last iteration."""
    for view in island.cluster.decodes:
        if view.report and view.report.num_running and view.report.duration_s > 0:
            yield view, view.report.duration_s


def _judged_at(island: Island, lead: LeadTime) -> float:
    """Returns when a request that is assigned now gets its next token. If none is in time by then, returns the present
    time: those that are not lost yet go first. Colocated instances compute prompts in between, so that it is not known
    there."""
    if island.cluster.is_colocated:
        return island.now
    soon = island.now + lead.seconds(island)
    is_any_in_time = any(True for _ in island.decode_queue.lost_from(soon, has_objective=True))
    return soon if is_any_in_time else island.now


def _is_any_late(island: Island, when: float) -> bool:
    """Returns whether RT waits that is lost, though its objective can be kept. A batch would take it first, because it
    has waited longest, and so make others late."""
    waiting = island.decode_queue.lost_from(-math.inf, has_objective=True)
    lost = takewhile(lambda each: is_lost(each, when), islice(waiting, MAX_JUDGED))
    return any(island.cluster.decode_s(each.num_tokens) <= each.deadlines.tbt_s for each in lost)


def waits_in_time(island: Island, lead: LeadTime) -> bool:
    """Returns whether RT that is not lost waits for a decode instance."""
    return any(True for _ in island.decode_queue.lost_from(_judged_at(island, lead)))


def is_lost(request: RoutedRequest, now: float) -> bool:
    return now > routing.lost_s(request)


def _least_real_time(request: RoutedRequest, views: Sequence[DecodeView]) -> DecodeView | None:
    """Returns the instance with the fewest RT requests. Among equals it prefers one that need not evict BE."""

    def load(view: DecodeView) -> tuple[int, bool, int]:
        has_room = view.num_available_slots > 0 and view.num_available_blocks >= view.blocks_to_run(request)
        return view.num_rt + len(view.coming), not has_room, -view.num_blocks_for_rt

    return min(views, key=load, default=None)


def _blocks_to_run(view: DecodeView, request: RoutedRequest) -> int:
    """Returns the blocks with which the instance takes the request. One that fills it has no spare block."""
    needed = view.blocks_to_run(request)
    return needed if needed <= view.num_blocks else view.blocks_of(request)


def _assign_fast_path(
    requests: Iterable[RoutedRequest], views: Sequence[DecodeView], waiting: RoutedRequest | None = None
) -> list[Assign]:
    """Assigns as many requests as fit, in order. Each goes to the instance that expects it, or to the one with the
    fewest RT requests. Among equals it prefers one that need not evict BE. If `waiting` fits nowhere, one instance is
    kept for it until it does. Otherwise smaller ones would take all room that becomes free."""
    by_name = {view.instance_id: view for view in views}
    blocks = {view.instance_id: view.num_blocks_for_rt for view in views if view.num_slots_for_rt > 0}
    blocks = {name: num_free for name, num_free in blocks.items() if num_free > 0}
    slots = {view.instance_id: view.num_slots_for_rt for view in views}
    idle = {
        view.instance_id: view.num_available_blocks if view.num_available_slots > 0 else 0 for view in views
    }
    load = {view.instance_id: view.num_rt for view in views}
    chosen: dict[InstanceId, list[RoutedRequest]] = {}
    num_unfit, least_unfit = 0, math.inf
    for request in requests:
        if not blocks:
            break
        if num_unfit >= MAX_UNFIT and request.num_blocks >= least_unfit:
            continue
        needed = {name: _blocks_to_run(by_name[name], request) for name in blocks}
        fitting = [name for name, num_free in blocks.items() if needed[name] <= num_free]
        able = [name for name in blocks if needed[name] <= by_name[name].num_blocks]
        if able and not fitting and request is waiting:
            del blocks[max(able, key=blocks.__getitem__)]
        if not fitting:
            num_unfit, least_unfit = num_unfit + 1, min(least_unfit, request.num_blocks)
            continue
        expected_at = request.expected_at
        best = min(
            fitting,
            key=lambda name: (name != expected_at, load[name], idle[name] < needed[name], -blocks[name]),
        )
        chosen.setdefault(best, []).append(request)
        blocks[best] -= needed[best]
        slots[best] -= 1
        load[best] += 1
        if not slots[best]:
            del blocks[best]
    return [Assign(name, found, is_urgent=True) for name, found in chosen.items()]


def _due_s(request: RoutedRequest) -> float:
    return request.deadlines.token_due_s(request.num_output)


def _may_wait(request: RoutedRequest, now: float) -> bool:
    """Returns whether the request has just been lost. Prompts that can be in time go first, but not for ever."""
    lost_s = request.deadlines.lost_s(request.num_output)
    return 0 < now - lost_s < DEMOTION_S
