"""Sends messages that can wait to a router a few at a time: the next few after it has confirmed the last.

A connection keeps its order. A real-time request behind thousands of best-effort requests, or of aborts, would wait
until the router has handled them all, so only a few are sent ahead. A pause follows each few. Where processes share
cores, accepting requests would otherwise leave no time to compute them.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from alignedserve.protocol.messages import Abort, Echo, Message
from alignedserve.types import RequestKey

# Messages that may be unconfirmed. Each takes the router some tenths of a millisecond.
MAX_AHEAD = 16
# Length of a pause, as a multiple of the time that the router took for the messages before it.
REST = 3.0
# Requests that one message aborts. They take the router some tens of milliseconds.
MAX_ABORTED = 1024
# Submissions that may wait here: enough to have the next few ready when they may be sent.
MAX_WAITING = 2 * MAX_AHEAD

# Sends one request.
Submit = Callable[[], None]
# Calls the function after the given number of seconds, if there is still a connection.
Later = Callable[[float, Callable[[], None]], object]


@dataclass(eq=False)
class SubmissionPacer:
    send: Callable[[Message], None]
    later: Later
    clock: Callable[[], float] = field(default_factory=lambda: time.monotonic)
    # Aborts are sent first, since they free blocks and slots.
    _aborts: dict[RequestKey, None] = field(default_factory=dict)
    _submits: dict[RequestKey, Submit] = field(default_factory=dict)
    # The number of messages since the last Echo; the ticket of the Echo that is unanswered, or of the pause after it;
    # and when that was sent.
    _num_ahead: int = 0
    _awaited: int | None = None
    _asked_s: float = 0.0
    _tickets: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def has_room(self) -> bool:
        return len(self._submits) < MAX_WAITING

    def submit(self, key: RequestKey, submit: Submit) -> None:
        """Calls `submit` when it is the request's turn, now or later."""
        self._submits[key] = submit
        self._go_on()

    def abort(self, key: RequestKey) -> bool:
        """Returns False if the request was not submitted yet; then it never will be."""
        if self._submits.pop(key, None):
            return False
        self._aborts[key] = None
        self._go_on()
        return True

    def answered(self, echo: Echo) -> None:
        """Called when the router has handled all messages before this Echo."""
        if echo.ticket == self._awaited:
            rest_s = REST * (self.clock() - self._asked_s)
            self.later(rest_s, functools.partial(self._rested, echo.ticket))

    def _rested(self, ticket: int) -> None:
        if ticket == self._awaited:
            self._awaited, self._num_ahead = None, 0
            self._go_on()

    def forget(self) -> None:
        """Drops all waiting messages: the connection is gone."""
        self._aborts.clear()
        self._submits.clear()
        self._awaited, self._num_ahead = None, 0

    def _go_on(self) -> None:
        while self._awaited is None and (self._aborts or self._submits):
            self._next()
            self._num_ahead += 1
            if self._num_ahead >= MAX_AHEAD:
                self._awaited, self._asked_s = next(self._tickets), self.clock()
                self.send(Echo(self._awaited))

    def _next(self) -> None:
        if self._aborts:
            keys = [*itertools.islice(self._aborts, MAX_ABORTED)]
            for key in keys:
                del self._aborts[key]
            self.send(Abort(keys))
        else:
            key = next(iter(self._submits))
            self._submits.pop(key)()
