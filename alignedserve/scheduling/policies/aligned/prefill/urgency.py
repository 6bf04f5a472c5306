"""In which order prompts of a class go: by `timing.deadlines`, with the time that they still take here, and for best
effort the time that its answer will take."""

from __future__ import annotations

import math

from alignedserve.scheduling.boundary import PrefillRequest
from alignedserve.timing.deadlines import UNSTATED_TTFT_S, due_s, is_demoted, place_s
from alignedserve.timing.estimate import Estimate


def place_of(request: PrefillRequest, estimate: Estimate, now: float) -> float:
    """The prompt with the smallest place is first."""
    needed_s = _needed_s(request, estimate)
    return place_s(request.deadlines, request.num_output, needed_s, request.since_s, now)


def is_ahead(begun: PrefillRequest, request: PrefillRequest, estimate: Estimate, now: float) -> bool:
    """Of two prompts with the same prefix, whether the one under way will have computed what both need before the
    other could.

    What it has computed moves its own place back, since it needs less. So it also counts that it is due no later.
    """
    if begun.is_rt != request.is_rt:
        return begun.is_rt
    if place_of(begun, estimate, now) <= place_of(request, estimate, now):
        return True
    if is_demoted(begun.deadlines, begun.num_output, _needed_s(begun, estimate), now):
        return False
    return _goal_s(begun) <= _goal_s(request) < math.inf


def _goal_s(request: PrefillRequest) -> float:
    due = due_s(request.deadlines, request.num_output)
    return request.since_s + UNSTATED_TTFT_S if due == math.inf and request.is_rt else due


def _needed_s(request: PrefillRequest, estimate: Estimate) -> float:
    needed_s = estimate.iteration([(request.num_computed, request.num_pending)], [])
    if not request.is_rt:
        num_left = max(request.predicted_len - request.num_output, 0)
        needed_s += num_left * estimate.iteration([], [request.num_tokens])
    return needed_s
