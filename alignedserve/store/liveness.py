"""Whether a server with many callers still answers, found from the calls themselves: only they wait for it.

Ticks are counted, not time: while the event loop stands still no answer can be read, and that is one tick.
"""

from __future__ import annotations


class Liveness:
    def __init__(self, num_ticks: int) -> None:
        """The server is silent if nothing came from it for so many ticks while a call waited."""
        self._num_ticks = num_ticks
        self._num_waiting = 0
        # The ticks since the last answer came, or since the first call that waits was made.
        self._num_missed = 0
        # Whether a call has given up waiting: from then on one call at a time tries, until there is an answer.
        self._is_given_up = False

    @property
    def is_silent(self) -> bool:
        return self._num_waiting > 0 and (self._is_given_up or self._num_missed >= self._num_ticks)

    @property
    def is_asked(self) -> bool:
        return self._num_waiting > 0

    def tick(self) -> None:
        self._num_missed += 1

    def asked(self) -> None:
        if not self._num_waiting:
            self._num_missed = 0
        self._num_waiting += 1

    def answered(self) -> None:
        """Notes that an answer came, whatever it was."""
        self._num_waiting -= 1
        self._num_missed = 0
        self._is_given_up = False

    def given_up(self) -> None:
        self._num_waiting -= 1
        self._is_given_up = True
