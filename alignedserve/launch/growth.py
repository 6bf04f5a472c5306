"""Decides the number of islands: one more while objectives are missed, one fewer when the others would be enough.
Pure.

Each look adds what was measured since the look before. When the number of islands changes, earlier measurements no
longer apply and are dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# One more island is wanted when, within SHORT_S seconds, real time missed more than MISSED_SHARE of at least
# ENOUGH_OBJECTIVES objectives, or jobs were late in every look.
SHORT_S = 30.0
MISSED_SHARE = 0.05
ENOUGH_OBJECTIVES = 20
# One fewer is wanted when neither happened for CALM_S seconds, and the others would compute for at most MOST_BUSY of
# the time.
CALM_S = 600.0
MOST_BUSY = 0.6


@dataclass(frozen=True)
class LatestLoad:
    """Measurements since the last look."""

    # objectives of real time
    num_met: int = 0
    num_missed: int = 0
    # whether jobs would be done too late at their present speed
    are_late: bool = False
    # the share of the time that instances of the busiest role compute, averaged over islands
    busy: float = 0.0


@dataclass(frozen=True)
class _Look:
    at_s: float
    seen: LatestLoad


class Growth:
    def __init__(self, least: int, most: int, at_first: int) -> None:
        """The number of islands stays between `least` and `most`, and is `at_first` at first."""
        self._least = least
        self._most = most
        self.wanted = min(max(at_first, least), most)
        # whether more than `most` would be needed
        self._is_short = False
        self._num_there = 0
        self._looks: deque[_Look] = deque()

    @property
    def wanted_without_limit(self) -> int:
        return self.wanted + self._is_short

    def look(self, now: float, num_there: int, seen: LatestLoad) -> None:
        """Adds measurements, and decides. `num_there` islands answer requests now."""
        if num_there != self._num_there:
            self._num_there = num_there
            self._looks.clear()
        looks = self._looks
        looks.append(_Look(now, seen))
        while len(looks) > 1 and looks[1].at_s <= now - CALM_S:
            looks.popleft()
        # Islands that are starting may be enough.
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


def _is_missed(seen: Sequence[LatestLoad]) -> bool:
    num_missed = sum(each.num_missed for each in seen)
    num = num_missed + sum(each.num_met for each in seen)
    return num >= ENOUGH_OBJECTIVES and num_missed > MISSED_SHARE * num


def leaving(there: Iterable[int], before: Iterable[int], wanted: int) -> set[int]:
    """Returns the numbers of the islands to give back so that `wanted` remain, the newest first. `before` are those
    already being given back. They are kept if others are lost meanwhile."""
    here = sorted(there)
    oldest = [number for number in here if number not in before]
    kept = [*oldest, *(number for number in here if number in before)]
    return set(kept[wanted:])
