"""Which of several jobs to do so that most of them are in time (Moore and Hodgson). Pure."""

from __future__ import annotations

import heapq
from collections.abc import Iterable


def most_in_time(jobs: Iterable[tuple[float, float]], begin_s: float) -> set[int]:
    """Returns the numbers of the jobs to do; no other choice would let more of them end in time.

    Jobs are done one after the other from `begin_s` on. Each is given as (when it is due, its seconds), the soonest due
    first. They are taken up in order; whenever one would end too late, the longest so far is left out.
    """
    ends_s = begin_s
    # The longest is on top.
    chosen: list[tuple[float, int]] = []
    for number, (due_s, seconds) in enumerate(jobs):
        heapq.heappush(chosen, (-seconds, number))
        ends_s += seconds
        if ends_s > due_s:
            ends_s += heapq.heappop(chosen)[0]
    return {number for _, number in chosen}
