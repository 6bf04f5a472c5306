"""Requests that wait for prefill, the most urgent first.

With classes there are two queues. What real time (RT) waits for is room in the pool, and its turn among its own; best
effort (BE) waits behind it in the same window of work ahead (static priority), or, with deadlines, has a window of its
own, since instances give it what RT leaves of each iteration.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator, Iterator
from typing import NamedTuple

from alignedserve.deadlines import DEMOTION_S
from alignedserve.mix import Discipline
from alignedserve.router.entry import Entry, State
from alignedserve.router.tally import Tally
from alignedserve.router.urgency import Urgency


class Room(NamedTuple):
    """For what is started."""

    # of work
    num_tokens: int
    num_requests: int

    def less(self, num_tokens: int, num_requests: int) -> Room:
        return Room(self.num_tokens - num_tokens, self.num_requests - num_requests)

    @property
    def is_there(self) -> bool:
        return self.num_tokens > 0 and self.num_requests > 0


class Place(NamedTuple):
    is_new: bool
    start_s: float
    number: int
    entry: Entry


class ClassQueue:
    def __init__(self) -> None:
        # a request that has left meanwhile, or came again, is skipped. Those without an objective, those that can
        # still make theirs, and those that can't: their places have moved back by DEMOTION_S
        self._steady: list[Place] = []
        self._alive: list[Place] = []
        self._lost: list[Place] = []
        self._numbers: dict[int, int] = {}
        self._num_pushed = 0
        self.num_demotions = 0
        # nothing starts until something was released
        self.is_refused = False

    def __len__(self) -> int:
        return len(self._numbers)

    def push(self, entry: Entry, urgency: Urgency) -> None:
        self._num_pushed += 1
        self._numbers[entry.key] = self._num_pushed
        heap = self._alive if urgency.can_be_lost else self._steady
        heapq.heappush(heap, Place(urgency.is_new, urgency.start_s, self._num_pushed, entry))

    def discard(self, entry: Entry) -> None:
        """Safe to repeat."""
        self._numbers.pop(entry.key, None)

    def first(self, now: float) -> Entry | None:
        """It stays there until it is discarded."""
        for heap in (self._steady, self._alive, self._lost):
            self._skip_gone(heap)
        while self._alive and self._alive[0].start_s < now:
            self._demote(heapq.heappop(self._alive))
            self._skip_gone(self._alive)
        tops = [heap[0] for heap in (self._steady, self._alive, self._lost) if heap]
        return min(tops).entry if tops else None

    def _demote(self, place: Place) -> None:
        self.num_demotions += 1
        heapq.heappush(self._lost, place._replace(start_s=place.start_s + DEMOTION_S))

    def _skip_gone(self, heap: list[Place]) -> None:
        while heap and self._numbers.get(heap[0].entry.key) != heap[0].number:
            heapq.heappop(heap)


class PrefillQueue:
    def __init__(self, discipline: Discipline) -> None:
        self.discipline = discipline
        self._first_class = ClassQueue()
        self._best_effort = ClassQueue() if discipline.has_classes else self._first_class
        # tokens to compute
        self._missing = Tally()

    def __len__(self) -> int:
        return len(self._missing)

    @property
    def num_tokens(self) -> int:
        """To compute of all of them."""
        return self._missing.total

    @property
    def of_real_time(self) -> tuple[int, int]:
        """How many requests, with how many tokens to compute."""
        return self._missing.count(is_rt=True), self._missing.sum(is_rt=True)

    @property
    def num_demotions(self) -> int:
        return sum(each.num_demotions for each in {self._first_class, self._best_effort})

    @property
    def is_rt_refused(self) -> bool:
        """Real time waits for room in the pool."""
        return self._first_class.is_refused

    def push(self, entry: Entry, urgency: Urgency) -> None:
        self.discard(entry)
        self._missing.put(entry.key, entry.num_missing, entry.is_rt)
        self._queue_of(entry).push(entry, urgency)

    def discard(self, entry: Entry) -> None:
        """Safe to repeat."""
        self._queue_of(entry).discard(entry)
        self._missing.discard(entry.key)

    def refused(self, entry: Entry) -> None:
        """The pool has no room for it."""
        self._queue_of(entry).is_refused = True

    def has_room_again(self) -> None:
        self._first_class.is_refused = self._best_effort.is_refused = False

    def startable(
        self, rt_room: Room, be_room: Room, now: float, may_start: Callable[[Entry], bool]
    ) -> Iterator[Entry]:
        """Requests to ask blocks for, as many as the rooms allow. Without deadlines they are one."""
        left = yield from self._take(self._first_class, rt_room, now, may_start)
        if self._best_effort is self._first_class:
            return
        if self.discipline.has_deadlines:
            yield from self._take(self._best_effort, be_room, now, may_start)
        elif not self._first_class:
            yield from self._take(self._best_effort, left, now, may_start)

    def _take(
        self, queue: ClassQueue, room: Room, now: float, may_start: Callable[[Entry], bool]
    ) -> Generator[Entry, None, Room]:
        while room.is_there and not queue.is_refused and (entry := queue.first(now)):
            if entry.state is not State.QUEUED:
                raise RuntimeError(f"request {entry.key} waits for prefill, but is {entry.state.value}")
            if not may_start(entry):
                break
            self.discard(entry)
            room = room.less(entry.num_missing, 1)
            yield entry
        return room

    def _queue_of(self, entry: Entry) -> ClassQueue:
        return self._first_class if entry.is_rt else self._best_effort
