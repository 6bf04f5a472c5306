"""Helpers of the policies' router parts. Pure."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from itertools import chain

from alignedserve.scheduling.island import (
    Assign,
    ClusterState,
    DecodeQueue,
    DecodeView,
    Island,
    Room,
    RoutedRequest,
)
from alignedserve.timing.deadlines import DEMOTION_S
from alignedserve.types import InstanceId

# Prompts that may wait at a colocated instance per request that it can run, so that it can choose among them. Those
# behind them wait at the router.
NUM_CHOICES = 4
# The lines of a router part with two.
REAL_TIME, BEST_EFFORT = 0, 1

# ---- prompts ---------------------------------------------------------------------------------------------------------


def window(cluster: ClusterState, num_iterations: float) -> Room:
    """Returns the room of this many iterations of all prefill instances. However short prompts are, an iteration holds
    at most as many as the instances run at once."""
    num_tokens = num_requests = 0
    for view in cluster.prefills:
        limits = view.hello.limits
        num_tokens += limits.max_num_batched_tokens
        num_requests += limits.max_num_seqs
    return Room(int(num_iterations * num_tokens), math.ceil(num_iterations * num_requests))


def ahead(island: Island, is_rt: bool) -> tuple[int, int]:
    """Returns the tokens and requests that were started and are not computed."""
    num_tokens, num_requests = island.reserving.sum(is_rt), island.reserving.count(is_rt)
    for view in island.cluster.prefills:
        num_tokens += view.pending.sum(is_rt)
        num_requests += view.pending.count(is_rt)
    return num_tokens, num_requests


def room_left(island: Island, num_iterations: float) -> Room:
    """Returns the room that is left in a window of work for both classes."""
    return window(island.cluster, num_iterations).less(*ahead(island, True)).less(*ahead(island, False))


def room_to_choose(island: Island, num_iterations: float, num_choices: int = NUM_CHOICES) -> Room:
    """Returns the room for policies with colocated instances that choose among prompts: those need all prompts to
    choose from. With separate prefill and decode, returns `room_left`."""
    if not island.cluster.is_colocated:
        return room_left(island, num_iterations)
    num_slots = sum(view.hello.limits.max_num_seqs for view in island.cluster.prefills)
    choices = Room(sys.maxsize, num_choices * num_slots)
    return choices.less(*ahead(island, True)).less(*ahead(island, False))


def _always(_: RoutedRequest) -> bool:
    return True


def start_line(
    island: Island, line: int, room: Room, may_start: Callable[[RoutedRequest], bool] = _always
) -> Generator[RoutedRequest, None, Room]:
    """Starts requests in order, until no room is left or `may_start` refuses one. Returns the room that is left."""
    queue = island.prefill_queue
    while (
        room.is_there
        and not queue.is_refused(line)
        and (request := queue.first(line, island.now)) is not None
    ):
        if not may_start(request):
            break
        queue.take(request)
        room = room.less(request.num_missing, 1)
        yield request
    return room


def has_evicted(island: Island) -> bool:
    """Returns whether evicted requests wait to return to colocated instances. They go before prompts, which would take
    the room that they wait for."""
    return island.cluster.is_colocated and len(island.decode_queue) > 0


# ---- pooled requests -------------------------------------------------------------------------------------------------


def patience_s(island: Island, starvation_s: float) -> float:
    """Returns the seconds after which a pooled request should be admitted. If there are more than the decode instances
    can hold, all wait long in any order, and only requests that wait even longer starve."""
    queue = island.decode_queue
    length = queue.num_tokens // max(len(queue), 1)
    capacity = sum(view.hello.limits.num_tokens_of(length) for view in island.cluster.decodes)
    num_fills = queue.num_tokens / capacity if capacity else 0.0
    return starvation_s * (1.0 + num_fills)


def lost_s(request: RoutedRequest) -> float:
    """Returns when a pooled request of real time is lost. One without an objective counts as lost when it has waited
    for DEMOTION_S, so that it gets turns beside those with one."""
    found = request.deadlines.lost_s(request.num_output)
    return found if found < math.inf else request.since_s + DEMOTION_S


def real_time_first(pooled: DecodeQueue) -> Iterator[RoutedRequest]:
    return chain(pooled.real_time, (request for request in pooled if not request.is_rt))


def emptiest(request: RoutedRequest, views: Iterable[DecodeView]) -> DecodeView | None:
    """Returns the emptiest decode instance with room for the request."""
    fitting = [
        view
        for view in views
        if view.num_available_slots > 0 and view.num_available_blocks >= view.blocks_to_run(request)
    ]
    return max(fitting, key=lambda view: view.num_available_blocks, default=None)


def assign_in_order(requests: Iterable[RoutedRequest], decodes: Sequence[DecodeView]) -> list[Assign]:
    """Assigns each request to the emptiest of the decode instances, as soon as it fits there. No request is overtaken
    by a later one."""
    waiting = iter(requests)
    first = next(waiting, None)
    if first is None:
        return []
    blocks = {view.instance_id: view.num_available_blocks for view in decodes}
    slots = {view.instance_id: view.num_available_slots for view in decodes}
    spans = {view.instance_id: view.hello.limits.span for view in decodes}
    chosen: dict[InstanceId, list[RoutedRequest]] = {}
    for request in chain([first], waiting):
        open_ones = [name for name in blocks if slots[name] > 0]
        if not open_ones:
            break
        best = max(open_ones, key=lambda name: blocks[name])
        needed = spans[best].num_held(request.num_cached, request.num_tokens)
        if needed > blocks[best]:
            break
        blocks[best] -= needed
        slots[best] -= 1
        chosen.setdefault(best, []).append(request)
    return [
        Assign(view.instance_id, chosen[view.instance_id]) for view in decodes if view.instance_id in chosen
    ]
