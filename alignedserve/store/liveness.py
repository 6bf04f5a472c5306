"""Whether a server with many callers still answers, judged only by those calls.

Time is counted in ticks of the event loop: no answer can be read while the loop is blocked, and that counts as one
tick.
"""

from __future__ import annotations


class Liveness:
    def __init__(self, num_ticks: int) -> None:
        """The server is silent if nothing arrived for `num_ticks` ticks while a call was waiting."""
        self._num_ticks = num_ticks
        self._num_waiting = 0
        # Ticks since the last answer, or since the first waiting call began.
        self._num_missed = 0
        # Whether a call has timed out. From then on only one call at a time is tried, until there is an answer.
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
        """Notes that an answer arrived, of any kind."""
        self._num_waiting -= 1
        self._num_missed = 0
        self._is_given_up = False

    def given_up(self) -> None:
        self._num_waiting -= 1
        self._is_given_up = True
