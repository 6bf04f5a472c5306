"""Where a request stands among those of its class that wait for prefill. Who has the least is first."""

from __future__ import annotations

import math
from typing import NamedTuple

from alignedserve.deadlines import due_s, latest_start_s
from alignedserve.mix import Discipline
from alignedserve.router.entry import Entry
from alignedserve.router.fleet import Fleet


class Urgency(NamedTuple):
    # a prompt that was begun and interrupted holds room in the pool: it goes before those that would want more
    is_new: bool
    start_s: float
    # it is demoted when it has not begun by then
    can_be_lost: bool


def urgency_of(entry: Entry, discipline: Discipline, fleet: Fleet, num_output: int) -> Urgency:
    """`num_output`: tokens that its answer is expected to have."""
    if not discipline.has_deadlines:
        return Urgency(True, entry.arrived_s, False)
    deadlines, number = entry.deadlines, len(entry.output)
    needed_s = fleet.prefill_s(entry.num_reusable, entry.num_tokens)
    if not entry.is_rt:
        needed_s += max(num_output - number, 0) * fleet.decode_s(entry.num_tokens)
    start_s = latest_start_s(deadlines, number, needed_s, entry.arrived_s)
    is_new = entry.is_rt or not entry.num_cached
    return Urgency(is_new, start_s, due_s(deadlines, number) < math.inf)
