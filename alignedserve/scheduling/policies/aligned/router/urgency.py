"""Where a request stands among those of its class that wait for prefill: the smallest urgency goes first. Pure."""

from __future__ import annotations

import math

from alignedserve.scheduling.forecast import FORGIVEN_S
from alignedserve.scheduling.island import Island, RoutedRequest, Urgency
from alignedserve.timing.deadlines import due_s, latest_start_s


def urgency_of(request: RoutedRequest, island: Island) -> Urgency:
    deadlines, number, cluster = request.deadlines, request.num_output, island.cluster
    needed_s = cluster.prefill_s(request.num_reusable, request.num_tokens)
    if not request.is_rt:
        num_left = max(island.expected_output(request) - number, 0)
        needed_s += num_left * cluster.decode_s(request.num_tokens)
    start_s = latest_start_s(deadlines, number, needed_s, request.arrived_s)
    is_new = request.is_rt or not request.num_cached
    start_s += yields_s(request, island.now)
    # An answer that was begun is not left for others.
    is_begun = number > 0 or not is_new
    return Urgency(is_new, start_s, due_s(deadlines, number) < math.inf and not is_begun)


def yields_s(request: RoutedRequest, now: float) -> float:
    """By how many seconds best effort whose answer exceeded its predicted length goes behind others (ALISE): until all
    of that will be forgiven. So it never waits for longer than others that come so much later."""
    return 0.0 if request.is_rt else request.demotion(now) * FORGIVEN_S
