"""Whether something that many ask still answers, told by what they hear: nobody else needs to wait for it.

Ticks are counted, and not time: while the event loop stands still nobody can hear anything, and that is one tick.
"""

from __future__ import annotations


class Liveness:
    def __init__(self, num_ticks: int) -> None:
        """Nothing heard for so many ticks, while somebody waits: it is silent."""
        self._num_ticks = num_ticks
        self._num_waiting = 0
        # since an answer came last, or the first one of those who wait asked
        self._num_missed = 0
        # somebody has given up waiting: from here on one at a time tries, until there is an answer
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
        """Whatever it said."""
        self._num_waiting -= 1
        self._num_missed = 0
        self._is_given_up = False

    def given_up(self) -> None:
        self._num_waiting -= 1
        self._is_given_up = True
