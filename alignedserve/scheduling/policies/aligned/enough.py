"""How little best effort (BE) is enough, for the sake of real time (RT). Pure.

Each iteration has costs that do not grow with what is in it: the more it does, the better BE's pace, and the longer RT
waits for its end. Most of the pace is reached long before all BE is in: then RT has the rest of the time.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


def num_enough(most: int, seconds: Callable[[int], float], share: float) -> int:
    """The smallest number with which an iteration has this share of the pace of an iteration with `most`. `seconds` is
    the time of an iteration with so many: more take longer, but less for each."""
    least_pace = share * most / seconds(most)
    return bisect_left(range(1, most), least_pace, key=lambda count: count / seconds(count)) + 1
