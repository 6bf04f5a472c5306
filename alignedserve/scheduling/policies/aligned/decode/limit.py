"""How much best effort (BE) may run beside real time (RT): twice as much after each iteration that kept RT's time, and
at once much less after one that did not. Pure."""

from __future__ import annotations

FALL = 4


class Limit:
    def __init__(self, most: int) -> None:
        self._most = most
        self.num_be = most

    def kept(self) -> None:
        self.num_be = min(2 * self.num_be, self._most)

    def missed(self, num_be: int) -> None:
        """An iteration with so many BE requests took too long. At least one may always run: its cost is predicted
        before it joins."""
        self.num_be = max(num_be // FALL, 1)
