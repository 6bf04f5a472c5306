"""The queues for prefill and for decode. Pure."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from itertools import chain
from typing import NamedTuple

from alignedserve.router.owners import OwnerOrder, OwnerTurns
from alignedserve.router.prefixes_in_flight import PrefixesInFlight
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.views import TokenCounts
from alignedserve.scheduling import routing
from alignedserve.scheduling.island import RoutedRequest, Urgency
from alignedserve.scheduling.policy import RouterPart
from alignedserve.timing.deadlines import DEMOTION_S
from alignedserve.types import RequestKey

# The most owners with waiting real time that are looked at in one event.
MAX_OWNERS = 16

# ---- for prefill -----------------------------------------------------------------------------------------------------

# Requests before their prefill, the most urgent first, in one line or several, as the policy defines.
#
# A request waits in a line until the policy starts it, and then for pool blocks (`reserving`).


# Tokens of other requests per token of a lost request that may start.
OTHERS = 20
# The most turns that are remembered. The pool answers within a few events, and each starts at most
# `prefill.MAX_STARTS`.
MOST_REMEMBERED = 1024
# The most requests that are found to wait for the prefix of another one in one event.
MAX_HELD = 256
# How many requests of a line ask the pool after it has refused one. In an overload with pools that are too small, 1
# left 1.4 points less in time than 16, and 4 half a point: small requests pass one that does not fit.
FEW_ASKING = 4.0
# Fewer released requests are put back one by one. More are sorted in, which takes as long for one as for all.
FEW_RELEASED = 32


class Position(NamedTuple):
    is_new: bool
    start_s: float
    number: int
    state: RequestState


class QueueEntry(NamedTuple):
    # The tokens by which the turn changed what lost requests may start.
    num_tokens: int
    is_lost: bool


class WaitingLine:
    """The requests of one owner in a line, ordered by urgency.

    A request that can't meet its objective any more is *lost*. It goes behind the requests that can still meet theirs.
    Against requests without an objective, it is ordered as if it had come `DEMOTION_S` later. Lost requests get a share
    of the tokens that start beside them, so that none waits forever.
    """

    def __init__(self) -> None:
        # Requests without an objective, requests that can still meet theirs, and lost requests; each in order.
        self._steady: list[Position] = []
        self._alive: list[Position] = []
        self._lost: list[Position] = []
        # The positions of all requests here.
        self._positions: dict[RequestKey, Position] = {}
        # Requests that wait for the prefix of another one, each with the list to which it returns.
        self._held: dict[RequestKey, list[Position]] = {}
        self._num_pushed = 0
        # Tokens of others that started beside lost requests, less the tokens that lost requests started in return.
        self._num_beside = 0
        # The last turns. If a request returns without having begun, its turn is undone.
        self._turns: dict[RequestKey, QueueEntry] = {}
        self.num_demotions = 0

    def __len__(self) -> int:
        return len(self._positions)

    @property
    def can_start(self) -> bool:
        """Whether any of its requests is not held."""
        return len(self._held) < len(self._positions)

    def push(self, state: RequestState, urgency: Urgency) -> None:
        self._num_pushed += 1
        position = Position(urgency.is_new, urgency.start_s, self._num_pushed, state)
        self._positions[state.key] = position
        turn = self._turns.pop(state.key, None)
        if turn and urgency.is_new and not state.output:
            self._num_beside = max(self._num_beside - turn.num_tokens, 0)
        if not urgency.can_be_lost:
            insort(self._steady, position)
        elif turn and turn.is_lost:
            insort(self._lost, position)
        else:
            insort(self._alive, position)

    def discard(self, key: RequestKey) -> bool:
        """Returns whether it was there."""
        position = self._positions.pop(key, None)
        if position is None:
            return False
        if self._held.pop(key, None) is None:
            self._remove(position)
        return True

    def _remove(self, position: Position) -> list[Position]:
        """Returns the list in which it was."""
        for each in (self._steady, self._alive, self._lost):
            place = bisect_left(each, position)
            if place < len(each) and each[place] is position:
                del each[place]
                return each
        raise RuntimeError(f"request {position.state.key} waits for prefill, but is in no list")

    def hold(self, key: RequestKey) -> None:
        """Lets others start before this request, until it is released."""
        self._held[key] = self._remove(self._positions[key])

    def release(self, keys: Iterable[RequestKey]) -> None:
        """Puts held requests back in their places."""
        released = [(self._held.pop(key), self._positions[key]) for key in keys]
        if len(released) < FEW_RELEASED:
            for places, position in released:
                insort(places, position)
            return
        for places, position in released:
            places.append(position)
        # Sorts in linear time: each list consists of a few sorted runs.
        for places in (self._steady, self._alive, self._lost):
            places.sort()

    @property
    def held(self) -> Collection[RequestKey]:
        return self._held.keys()

    def take(self, key: RequestKey) -> RequestState:
        position = self._positions[key]
        if self._lost:
            is_lost, num_tokens = self._lost[0] is position, position.state.num_missing
            if is_lost:
                num_tokens = -min(self._num_beside, OTHERS * num_tokens)
            self._num_beside += num_tokens
            self._turns[key] = QueueEntry(num_tokens, is_lost)
            if len(self._turns) > MOST_REMEMBERED:
                del self._turns[next(iter(self._turns))]
        self.discard(key)
        return position.state

    def first(self, now: float) -> RequestState | None:
        """Returns the next request to start, without removing it."""
        self._demote(now)
        most = OTHERS * self._lost[0].state.num_missing if self._lost else 0
        self._num_beside = min(self._num_beside, most)
        tops = [each[0] for each in (self._steady, self._alive) if each]
        top = min(tops, default=None)
        if self._lost and (top is None or self._goes_before(self._lost[0], top, most)):
            return self._lost[0].state
        return None if top is None else top.state

    def _goes_before(self, lost: Position, top: Position, most: int) -> bool:
        """Returns whether a lost request goes before the first of the others. It never goes before one that has begun,
        because that may hold the blocks that the lost one would wait for."""
        has_turn = self._num_beside >= most
        return top.is_new and (has_turn or (not self._alive and lost.start_s + DEMOTION_S < top.start_s))

    def soonest(self, count: int, now: float) -> list[tuple[RequestState, float]]:
        self._demote(now)
        return [(position.state, position.start_s) for position in self._alive[:count]]

    def _demote(self, now: float) -> None:
        num_lost = 0
        while num_lost < len(self._alive) and self._alive[num_lost].start_s < now:
            insort(self._lost, self._alive[num_lost])
            num_lost += 1
        self.num_demotions += num_lost
        del self._alive[:num_lost]


class Line:
    """The requests of all owners in a line. Owners take turns (`owners.py`)."""

    def __init__(self) -> None:
        self.turns = OwnerTurns()
        self._of: dict[str, WaitingLine] = {}
        self._order = OwnerOrder(self.turns, lambda owner: owner in self._of and self._of[owner].can_start)
        self._num_waiting = 0
        self._num_demotions = 0
        # How often its last request has left it.
        self.num_emptied = 0
        # Whether the pool had no room for a request of this line. If so, nothing starts until blocks are released.
        self.is_refused = False
        # How many requests of this line may ask the pool for blocks at once: few after a refusal, and twice as many
        # with each grant. Otherwise, all that wait would ask each time that blocks are released for a few.
        self.most_asking = math.inf

    def __len__(self) -> int:
        return self._num_waiting

    @property
    def num_demotions(self) -> int:
        return self._num_demotions + sum(each.num_demotions for each in self._of.values())

    @property
    def held(self) -> Iterator[RequestKey]:
        return (key for each in self._of.values() for key in each.held)

    @property
    def next_owner(self) -> str | None:
        """The owner that has the turn."""
        return self._order.first()

    def num_of(self, owner: str) -> int:
        return len(self._of.get(owner, ()))

    def push(self, state: RequestState, urgency: Urgency) -> None:
        self._order.add(state.owner)
        self._of.setdefault(state.owner, WaitingLine()).push(state, urgency)
        self._num_waiting += 1

    def discard(self, state: RequestState) -> None:
        """Safe to repeat."""
        if (own := self._of.get(state.owner)) and own.discard(state.key):
            self._left(state.owner, own)

    def take(self, request: RoutedRequest) -> None:
        own, is_in_turn = self._of[request.owner], request.owner == self.next_owner
        state = own.take(request.key)
        # A request that the pool has refused has been counted already.
        count = self.turns.had_turn if is_in_turn else self.turns.serve
        count(state.owner, max(state.num_missing - state.num_counted, 0))
        state.num_counted = max(state.num_missing, state.num_counted)
        self._left(request.owner, own)

    def _left(self, owner: str, own: WaitingLine) -> None:
        self._num_waiting -= 1
        self.num_emptied += not self._num_waiting
        # A single owner keeps the turns of its lost requests.
        if not own and len(self._of) > 1:
            self._num_demotions += own.num_demotions
            del self._of[owner]

    def hold(self, state: RequestState) -> None:
        self._of[state.owner].hold(state.key)

    def release(self, states: Iterable[RequestState]) -> None:
        by_owner: dict[str, list[RequestKey]] = {}
        for state in states:
            by_owner.setdefault(state.owner, []).append(state.key)
        for owner, keys in by_owner.items():
            self._order.add(owner)
            self._of[owner].release(keys)

    def first(self, now: float, owner: str | None = None) -> RequestState | None:
        """Returns the next request to start, without removing it. `owner`: the one of this owner, with or without its
        turn."""
        owner = self.next_owner if owner is None else owner
        return None if owner is None or owner not in self._of else self._of[owner].first(now)

    def owners(self) -> list[str]:
        """Returns the owners of waiting requests, the least served first."""
        return sorted(self._of, key=self.turns.served)

    def soonest(self, count: int, now: float) -> list[tuple[RequestState, float]]:
        owner = self.next_owner
        return [] if owner is None else self._of[owner].soonest(count, now)

    def check_turns(self) -> None:
        self._order.check([owner for owner, own in self._of.items() if own.can_start])


class PrefillQueue:
    def __init__(self, policy: RouterPart) -> None:
        self._policy = policy
        self._lines = [Line() for _ in range(policy.num_lines)]
        # Tokens to compute of each request that waits in a line.
        self._missing = TokenCounts()
        # Tokens to compute of each request that has started and waits for pool blocks.
        self.reserving = TokenCounts()
        # The number of open requests of each owner.
        self._num_open: Counter[str] = Counter()
        # Prefixes that started requests bring, and the requests in the lines that wait for them.
        self.prefixes = PrefixesInFlight()
        # Best-effort requests in the lines with KV in the pool that other requests may not take.
        self.pinned: dict[RequestKey, RequestState] = {}

    def __len__(self) -> int:
        """Returns the number of requests in the lines."""
        return len(self._missing)

    @property
    def num_tokens(self) -> int:
        """Tokens to compute of all requests in the lines."""
        return self._missing.total

    def num_tokens_of(self, is_rt: bool) -> int:
        """Returns the tokens to compute of the class: those of requests in the lines, and those of started requests
        that wait for blocks."""
        return self._missing.sum(is_rt) + self.reserving.sum(is_rt)

    def waiting_before(self, is_rt: bool, owner: str | None = None) -> tuple[int, int]:
        """Returns how many requests, with how many tokens to compute, would be before a new one of this class. Requests
        that would be behind it are no reason to refuse it. `owner`: counts only this owner's."""
        own = self._policy.line(is_rt)
        classes = [each for each in (True, False) if self._policy.line(each) <= own]
        both = [self._missing, self.reserving]
        return (
            sum(counts.count(each, owner) for counts in both for each in classes),
            sum(counts.sum(each, owner) for counts in both for each in classes),
        )

    def turns(self, is_rt: bool) -> OwnerTurns:
        """Returns the turns of owners in the line of this class."""
        return self._lines[self._policy.line(is_rt)].turns

    @property
    def owners_compete(self) -> bool:
        """Whether several owners have open requests."""
        return len(self._num_open) > 1

    def opened(self, state: RequestState) -> None:
        self._num_open[state.owner] += 1
        self.turns(state.is_rt).opened(state.owner)

    def ended(self, state: RequestState) -> None:
        self._num_open[state.owner] -= 1
        if not self._num_open[state.owner]:
            del self._num_open[state.owner]
        self.turns(state.is_rt).ended(state.owner)

    def next_owner(self, is_rt: bool) -> str | None:
        """Returns the owner of the next prompt in the line of this class."""
        return self._lines[self._policy.line(is_rt)].next_owner

    def rt_owners(self) -> list[str]:
        """Returns up to MAX_OWNERS owners with requests in the line of real time, the least served first."""
        return self._lines[self._policy.line(True)].owners()[:MAX_OWNERS]

    def num_under_way(self, owner: str) -> int:
        """Returns how many requests of this owner, in the line of real time, have started and not ended."""
        line = self._lines[self._policy.line(True)]
        return line.turns.num_open(owner) - line.num_of(owner)

    @property
    def num_demotions(self) -> int:
        return sum(line.num_demotions for line in self._lines)

    def push(self, state: RequestState, urgency: Urgency) -> None:
        self.discard(state)
        self._missing.put(state.key, state.num_missing, state.is_rt, state.owner)
        self._line_of(state).push(state, urgency)

    def reserve(self, state: RequestState) -> None:
        """Counts a started request that waits for pool blocks."""
        self.reserving.put(state.key, state.num_missing, state.is_rt, state.owner)

    def discard(self, state: RequestState) -> None:
        """Safe to repeat."""
        self._line_of(state).discard(state)
        self.prefixes.forget(state.key)
        self._missing.discard(state.key)
        self.reserving.discard(state.key)
        self.pinned.pop(state.key, None)

    def take_pinned(self) -> list[RequestState]:
        """Returns the pinned requests and unpins them. They stay in their lines."""
        pinned, self.pinned = list(self.pinned.values()), {}
        return pinned

    def refused(self, state: RequestState) -> None:
        """Lets the request's line wait, because the pool has no room for the request."""
        line = self._line_of(state)
        line.is_refused, line.most_asking = True, FEW_ASKING

    def granted(self, state: RequestState) -> None:
        self._line_of(state).most_asking *= 2

    def clear_refusals(self) -> None:
        for line in self._lines:
            line.is_refused = False

    def clear_refusals_of_rt(self) -> None:
        self._lines[self._policy.line(True)].is_refused = False

    # ---- prefixes in flight ------------------------------------------------------------------------------------------

    def prefix_found(self, state: RequestState) -> None:
        """Releases requests that wait for what the pool has found of this one's prompt."""
        self._release(self.prefixes.found(state))

    def prefix_ended(self, state: RequestState) -> None:
        """Releases requests that wait for this one, because it has been saved or has lost its place. Safe to repeat."""
        self._release(self.prefixes.discard(state))

    def _release(self, states: Iterable[RequestState]) -> None:
        by_line: dict[int, list[RequestState]] = {}
        for state in states:
            by_line.setdefault(self._policy.line(state.is_rt), []).append(state)
        for line, of_line in by_line.items():
            self._lines[line].release(of_line)

    @property
    def owners(self) -> set[str]:
        """The owners with a count of anything."""
        return {
            *self._num_open,
            *self._missing.owners,
            *self.reserving.owners,
            *(owner for line in self._lines for owner in line.turns.owners),
        }

    def check_turns(self) -> None:
        """Raises RuntimeError unless it is the turn of the least served owner in each line."""
        for line in self._lines:
            line.check_turns()

    def check(self) -> None:
        """Raises RuntimeError unless each held request waits for one that brings its prefix."""
        self.prefixes.check(key for line in self._lines for key in line.held)

    # ---- for the policy: see `scheduling.island.PrefillQueue` --------------------------------------------------------

    def is_empty(self, line: int) -> bool:
        return not len(self._lines[line])

    def num_emptied(self, line: int) -> int:
        return self._lines[line].num_emptied

    def is_refused(self, line: int) -> bool:
        classes = (is_rt for is_rt in (True, False) if self._policy.line(is_rt) == line)
        num_asking = sum(map(self.reserving.count, classes))
        return self._lines[line].is_refused or num_asking >= self._lines[line].most_asking

    def first(self, line: int, now: float, owner: str | None = None) -> RequestState | None:
        for _ in range(MAX_HELD):
            state = self._lines[line].first(now, owner)
            if state is None:
                return None
            if state.phase is not Phase.QUEUED:
                raise RuntimeError(f"request {state.key} waits for prefill, but is {state.phase.value}")
            if not self.prefixes.lets_wait(state):
                return state
            self._lines[line].hold(state)
        return None

    def soonest(self, line: int, count: int, now: float) -> list[tuple[RoutedRequest, float]]:
        return [*self._lines[line].soonest(count, now)]

    def take(self, request: RoutedRequest) -> None:
        self._lines[self._policy.line(request.is_rt)].take(request)
        self._missing.discard(request.key)

    def _line_of(self, state: RequestState) -> Line:
        return self._lines[self._policy.line(state.is_rt)]


# ---- for decode ------------------------------------------------------------------------------------------------------

# (when it is lost without its next token, number of additions before it, key) of a real-time request
Lost = tuple[float, int, RequestKey]


class _Pooled:
    """One owner's requests of a class in the pool."""

    def __init__(self) -> None:
        # In order of arrival.
        self.states: dict[RequestKey, RequestState] = {}
        # When real time is lost, sorted; and the same of requests with an objective between tokens.
        self.by_lost: list[Lost] = []
        self.with_objective: list[Lost] = []
        # Tokens of the prompts and outputs of all requests.
        self.num_tokens = 0

    def add(self, state: RequestState, lost: Lost | None) -> None:
        self.states[state.key] = state
        self.num_tokens += state.num_tokens
        if lost is not None:
            for by_lost in self._sorted(state):
                insort(by_lost, lost)

    def discard(self, state: RequestState, lost: Lost | None) -> None:
        del self.states[state.key]
        self.num_tokens -= state.num_tokens
        if lost is not None:
            for by_lost in self._sorted(state):
                del by_lost[bisect_left(by_lost, lost)]

    def _sorted(self, state: RequestState) -> list[list[Lost]]:
        return [self.by_lost, *([self.with_objective] if state.deadlines.tbt_s < math.inf else [])]


class _PooledClass:
    """All requests of a class in the pool. Owners take turns."""

    def __init__(self, turns: OwnerTurns) -> None:
        self._turns = turns
        self.of: dict[str, _Pooled] = {}
        self._order = OwnerOrder(turns, self.of.__contains__)
        # The owner that is shown instead of the one that has the turn.
        self.shown: str | None = None

    def add(self, state: RequestState, lost: Lost | None = None) -> None:
        self._order.add(state.owner)
        self.of.setdefault(state.owner, _Pooled()).add(state, lost)

    def discard(self, state: RequestState, lost: Lost | None = None) -> None:
        own = self.of[state.owner]
        own.discard(state, lost)
        if not own.states:
            del self.of[state.owner]

    @property
    def served(self) -> float:
        """The served work of the owner that has the turn."""
        owner = self._order.first()
        return math.inf if owner is None else self._turns.served(owner)

    @property
    def next(self) -> _Pooled:
        """The requests of the owner that has the turn, or is shown."""
        owner = self._order.first() if self.shown is None else self.shown
        return _NOTHING if owner is None else self.of.get(owner, _NOTHING)

    def in_turn(self) -> list[str]:
        """Returns the owners, the least served first."""
        first = self._order.first()
        return sorted(self.of, key=lambda owner: (owner != first, self._turns.served(owner)))

    def check_turns(self) -> None:
        self._order.check(self.of)


_NOTHING = _Pooled()


class DecodeQueue:
    """Requests that wait in the pool for a decode instance.

    Policies see real time of one owner only, the one that has the turn or is shown, and all best effort."""

    def __init__(self, rt_turns: OwnerTurns, be_turns: OwnerTurns) -> None:
        # In order of arrival.
        self._states: dict[RequestKey, RequestState] = {}
        self._rt, self._be = _PooledClass(rt_turns), _PooledClass(be_turns)
        self._lost: dict[RequestKey, Lost] = {}
        self._num_be = self._num_be_tokens = 0
        # Counts additions, and all other changes after which an unsuccessful search may succeed.
        self.num_changes = 0

    @property
    def competes(self) -> bool:
        """Whether real time of several owners waits."""
        return len(self._rt.of) > 1

    @property
    def owners(self) -> set[str]:
        return {*self._rt.of, *self._be.of}

    def rt_owners(self) -> list[str]:
        """Returns up to MAX_OWNERS owners of real time, the least served first."""
        return self._rt.in_turn()[:MAX_OWNERS]

    def show(self, owner: str | None) -> None:
        """Shows real time of this owner. None: that of the owner that has the turn."""
        self._rt.shown = owner

    def check_turns(self) -> None:
        """Raises RuntimeError unless it is the turn of the least served owner in each class."""
        self._rt.check_turns()
        self._be.check_turns()

    @property
    def num_tokens(self) -> int:
        return self._rt.next.num_tokens + self._num_be_tokens

    def __len__(self) -> int:
        return len(self._rt.next.states) + self._num_be

    def __iter__(self) -> Iterator[RequestState]:
        """Yields requests in order of arrival, or by turns of their owners if there are several."""
        if len(self.owners) <= 1:
            return iter(self._states.values())
        in_turn = [self._rt.next, self._be.next]
        others = [each for each in self._be.of.values() if each is not in_turn[1]]
        if self._be.served < self._rt.served:
            in_turn.reverse()
        return chain.from_iterable(each.states.values() for each in (*in_turn, *others))

    @property
    def real_time(self) -> Collection[RequestState]:
        """Real-time requests in order of arrival."""
        return self._rt.next.states.values()

    def soonest(self, count: int, now: float) -> list[RequestState]:
        by_lost = self._rt.next.by_lost
        num_lost = bisect_left(by_lost, (now,))
        num_in_time = count - min(num_lost, 1)
        in_time = [self._states[key] for *_, key in by_lost[num_lost : num_lost + num_in_time]]
        if not any(state.deadlines.tbt_s < math.inf for state in in_time):
            return [self._states[key] for *_, key in by_lost[:count]]
        in_time.sort(key=lambda state: state.deadlines.token_due_s(len(state.output)))
        lost = by_lost[: min(num_lost, count - len(in_time))]
        return [*in_time, *(self._states[key] for *_, key in lost)]

    def lost_from(self, when: float, has_objective: bool = False) -> Iterator[RequestState]:
        by_lost = self._rt.next.with_objective if has_objective else self._rt.next.by_lost
        indices = range(bisect_left(by_lost, (when,)), len(by_lost))
        return (self._states[by_lost[index][-1]] for index in indices)

    def get(self, key: RequestKey) -> RequestState | None:
        return self._states.get(key)

    def add(self, state: RequestState) -> None:
        self._states[state.key] = state
        if state.is_rt:
            self._lost[state.key] = lost = routing.lost_s(state), self.num_changes, state.key
            self._rt.add(state, lost)
        else:
            self._be.add(state)
            self._num_be += 1
            self._num_be_tokens += state.num_tokens
        self.num_changes += 1

    def discard(self, state: RequestState) -> None:
        """Safe to repeat."""
        if self._states.pop(state.key, None) is None:
            return
        if lost := self._lost.pop(state.key, None):
            self._rt.discard(state, lost)
        else:
            self._be.discard(state)
            self._num_be -= 1
            self._num_be_tokens -= state.num_tokens
