"""How many islands there should be: one more while those that are there miss objectives, one fewer when the others
would be enough. Pure.

Each look adds what was seen since the one before. What was seen before the number of islands changed says nothing about
those that there are now, and is forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# One more is wanted when so many seconds long more than this share of real time's objectives was missed, of at least so
# many, or jobs were about to be late all the while.
SHORT_S = 30.0
MISSED_SHARE = 0.05
ENOUGH_OBJECTIVES = 20
# One fewer is wanted when so many seconds long that was not so, and the others would compute for no more than this
# share of the time.
CALM_S = 600.0
MOST_BUSY = 0.6


@dataclass(frozen=True)
class Seen:
    """What was seen since the last look."""

    # Of real time.
    num_met: int = 0
    num_missed: int = 0
    # Whether jobs would be done too late at their present speed.
    are_late: bool = False
    # The share of the time that instances compute, in the mean of the islands; those of the busiest role count.
    busy: float = 0.0


@dataclass(frozen=True)
class _Look:
    at_s: float
    seen: Seen


class Growth:
    def __init__(self, least: int, most: int, at_first: int) -> None:
        """There should be `least` to `most` islands; so many are there at first."""
        self._least = least
        self._most = most
        self.wanted = min(max(at_first, least), most)
        # Whether more than `most` would be wanted.
        self._is_short = False
        self._num_there = 0
        self._looks: deque[_Look] = deque()

    @property
    def wanted_without_limit(self) -> int:
        return self.wanted + self._is_short

    def look(self, now: float, num_there: int, seen: Seen) -> None:
        """So many islands answer requests now."""
        if num_there != self._num_there:
            self._num_there = num_there
            self._looks.clear()
        looks = self._looks
        looks.append(_Look(now, seen))
        while len(looks) > 1 and looks[1].at_s <= now - CALM_S:
            looks.popleft()
        # Those that are on their way may be all that it takes.
        is_short = num_there >= self.wanted and self._misses_too_much(now)
        self._is_short = is_short and self.wanted == self._most
        if is_short and self.wanted < self._most:
            self._want(self.wanted + 1)
        elif not is_short and self.wanted > self._least and self._would_be_enough(now, self.wanted - 1):
            self._want(self.wanted - 1)

    def _want(self, count: int) -> None:
        self.wanted = count
        self._looks.clear()

    def _misses_too_much(self, now: float) -> bool:
        if not self._looks_back(now, SHORT_S):
            return False
        recent = [look.seen for look in self._looks if look.at_s > now - SHORT_S]
        return _is_missed(recent) or all(seen.are_late for seen in recent)

    def _would_be_enough(self, now: float, count: int) -> bool:
        if not self._num_there or not self._looks_back(now, CALM_S):
            return False
        seen = [look.seen for look in self._looks]
        busy = sum(each.busy for each in seen) / len(seen)
        is_calm = not _is_missed(seen) and not any(each.are_late for each in seen)
        return is_calm and busy * self._num_there <= MOST_BUSY * count

    def _looks_back(self, now: float, seconds: float) -> bool:
        return bool(self._looks) and self._looks[0].at_s <= now - seconds


def _is_missed(seen: Sequence[Seen]) -> bool:
    num_missed = sum(each.num_missed for each in seen)
    num = num_missed + sum(each.num_met for each in seen)
    return num >= ENOUGH_OBJECTIVES and num_missed > MISSED_SHARE * num


def leaving(there: Iterable[int], before: Iterable[int], wanted: int) -> set[int]:
    """Returns which islands, by their numbers, are given back so that `wanted` remain. `before` are those that were
    being given back already; they stay if others are lost meanwhile. The newest ones go first."""
    here = sorted(there)
    oldest = [number for number in here if number not in before]
    kept = [*oldest, *(number for number in here if number in before)]
    return set(kept[wanted:])
