"""Tools with which real time (RT) and best effort (BE) share an instance, and what the router knows of that. Pure.

- **Sliding windows** hold the tightest objective and the longest request of recent RT.
- **BE credit** is the time that BE is owed.
- **Headroom** is what BE leaves free for RT.
- **Enough** is the smallest amount of BE with most of the pace. Each iteration has costs that do not grow with its
  contents: the more it does, the better BE's pace, and the longer RT waits for its end. Most of the pace is reached
  long before all BE is in: then RT has the rest of the time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable

from alignedserve.protocol.messages import InstanceLimits

# Length of the sliding windows, in seconds.
MEMORY_S = 60.0
# The largest share of the blocks that is kept free because an RT request was that long.
MAX_HEADROOM_SHARE = 0.25
# Beside streams that will be late anyway, an iteration with prompts may take this many times as long as one without:
# prompts get half of the time.
LATE = 2.0


# ---- what was seen lately --------------------------------------------------------------------------------------------


class SlidingMinimum:
    """The smallest of the numbers that were added within the last minute."""

    def __init__(self) -> None:
        # Pairs of time and number, both ascending: a number is dropped when a later one is no larger.
        self._seen: deque[tuple[float, float]] = deque()

    def add(self, number: float, now: float) -> None:
        while self._seen and self._seen[-1][1] >= number:
            self._seen.pop()
        self._seen.append((now, number))

    def value(self, default: float, now: float) -> float:
        while self._seen and self._seen[0][0] < now - MEMORY_S:
            self._seen.popleft()
        return self._seen[0][1] if self._seen else default


class SlidingMaximum:
    """The largest of the numbers that were added within the last minute."""

    def __init__(self) -> None:
        # The negated numbers: the smallest of them is the largest of the numbers.
        self._negated = SlidingMinimum()

    def add(self, number: float, now: float) -> None:
        self._negated.add(-number, now)

    def value(self, default: float, now: float) -> float:
        return -self._negated.value(-default, now)


# ---- BE credit -------------------------------------------------------------------------------------------------------


class BeCredit:
    """The time of an instance that best effort is owed, in seconds: it grows while any best effort is there."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._then_s: float | None = None
        self.seconds = 0.0

    def pass_time(self, now: float, is_be_there: bool, most_s: float) -> None:
        """Adds the time since the last call. No more than `most_s` is kept for later."""
        if self._then_s is not None and is_be_there:
            self.seconds += self._share * max(now - self._then_s, 0.0)
        self._then_s = now
        self.seconds = min(self.seconds, most_s)

    def spend(self, seconds: float) -> None:
        """Spends credit on BE; it never falls below zero, so BE owes nothing for time that it got beyond."""
        self.seconds = max(self.seconds - seconds, 0.0)


# ---- headroom --------------------------------------------------------------------------------------------------------


def headroom_blocks(limits: InstanceLimits, share: float, longest: float) -> int:
    """Returns a share of all blocks, or what the longest recent request needs (up to MAX_HEADROOM_SHARE) if that is
    more; none without a share."""
    if not share:
        return 0
    of_longest = min(limits.span.num_held(int(longest), int(longest)), MAX_HEADROOM_SHARE * limits.num_blocks)
    return int(max(share * limits.num_blocks, of_longest))


def headroom_slots(limits: InstanceLimits, share: float) -> int:
    """Returns a share of all slots, at least one if there are several; none without a share."""
    return max(int(share * limits.max_num_seqs), 1) if share and limits.max_num_seqs > 1 else 0


# ---- pace ------------------------------------------------------------------------------------------------------------


def num_enough(most: int, seconds: Callable[[int], float], share: float) -> int:
    """Returns the smallest number with which an iteration has this share of the pace of an iteration with `most`.

    `seconds` returns the time of an iteration by the number in it: more take longer, but less for each.
    """
    least_pace = share * most / seconds(most)
    return bisect_left(range(1, most), least_pace, key=lambda count: count / seconds(count)) + 1
