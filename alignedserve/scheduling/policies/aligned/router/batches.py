"""Batches of requests of similar prefix length, found in the pool's quad-tree. Pure.

**While real time comes and goes**, a decode instance always has a next batch waiting: it is formed as soon as the
earlier one is admitted. Meanwhile pooled requests whose length lies among those that run are offered beside it.
Batches mix there, because real time does not wait for its like.

**With best effort alone**, an instance runs one batch at a time. Requests of like length join it as long as there are
any, and the others are held back. When the batch has shrunk, or somebody has been held back for long, or a window
presses, the next one is formed, and takes its place: what is left of the old one goes back to the pool with its KV, and
joins a later batch of requests as long as it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from alignedserve.protocol.messages import FindNear, FormBatch
from alignedserve.scheduling import routing
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import DecodeView, Island, RoutedRequest

# A batch is replaced when what runs fills no more than this share of what those that wait would fill. With a larger one
# more KV is moved, with a smaller one iterations are emptier. (Tuned, as the next two, on simulated documents, of one
# kind of lengths and of two: OPT-13B on an A100.)
SWITCH = 0.65
# A batch that replaces the running one fills so much of the instance, if enough requests wait.
REPLACING_SHARE = 0.9
# Best effort is held back for so many times as long as a pooled request waits before others go behind it.
HELD_BACK = 20.0
# A window presses when it leaves less than so many times the time that the request needs.
PRESSED = 2.0
# Of those that wait, so many are looked at for their windows.
MAX_LOOKED_AT = 64
# The number of lengths in one of the quad-tree's narrowest ranges; those of each level above have four times as many.
LEAF_WIDTH = 16


def decide(island: Island, config: SchedulingConfig, is_rt_known: bool) -> Iterator[FormBatch | FindNear]:
    """`is_rt_known`: real time came lately."""
    if not len(island.decode_queue):
        return
    patience_s = routing.patience_s(island, config.starvation_s)
    for view in sorted(island.cluster.decodes, key=lambda view: -view.num_available_blocks):
        near = _find_near(view, island, config, is_rt_known, patience_s)
        batch = _form_batch(view, island, config, is_rt_known, patience_s)
        is_wanted = is_rt_known or (not near and _is_shrunk(view, island))
        if batch and (is_wanted or (not _is_coming(island) and _is_pressing(island, HELD_BACK * patience_s))):
            view.batch_search.ask(island.decode_queue.num_changes)
            yield batch
        elif near:
            view.near_search.ask(_near_what(near, island))
            yield near


# ---- the next batch --------------------------------------------------------------------------------------------------


def _form_batch(
    view: DecodeView, island: Island, config: SchedulingConfig, is_rt_known: bool, patience_s: float
) -> FormBatch | None:
    """Asks for a batch with room for the longest request: one that fits into no batch would starve."""
    if view.batch or not view.batch_search.is_due(island.decode_queue.num_changes):
        return None
    limits = view.hello.limits
    share, least = config.batch_share, config.min_batch_requests
    if not is_rt_known:
        share, least = REPLACING_SHARE, limits.max_num_seqs
    return FormBatch(
        decode=view.instance_id,
        max_blocks=max(limits.max_request_blocks, int(view.num_blocks * share)),
        min_requests=least,
        max_requests=limits.max_num_seqs,
        starvation_s=patience_s,
        replaces=not is_rt_known,
    )


def _is_shrunk(view: DecodeView, island: Island) -> bool:
    """Whether what the instance has fills little of it, beside what waits and would fit."""
    queue, limits, report = island.decode_queue, view.hello.limits, view.report

    def memory(num_requests: int, num_tokens: int) -> float:
        return num_tokens / limits.num_tokens_of(num_tokens // max(num_requests, 1))

    def filling(num_requests: int, memory: float) -> float:
        return min(max(num_requests / limits.max_num_seqs, memory), 1.0)

    num_tokens = report.sum_lengths if report else 0
    taken = memory(len(view.running), num_tokens) + sum(view.near.values()) / limits.num_blocks
    here = filling(len(view.running) + len(view.near), taken)
    return here <= SWITCH * filling(len(queue), memory(len(queue), queue.num_tokens))


def _is_coming(island: Island) -> bool:
    """Whether a batch is on its way to an instance: who presses may be in it, and no other one need make room."""
    return any(view.batch or view.batch_search.is_asked for view in island.cluster.decodes)


def _is_pressing(island: Island, patience_s: float) -> bool:
    """Whether best effort is to be held back no longer: the first has waited for so long, or a window presses."""
    queue = island.decode_queue
    if next(iter(queue)).since_s + patience_s <= island.now:
        return True
    return any(_presses(request, island) for request in islice(queue, MAX_LOOKED_AT))


def _presses(request: RoutedRequest, island: Island) -> bool:
    """Whether the window of its job leaves no time for waiting."""
    if request.deadlines.job_due_s == math.inf:
        return False
    num_left = max(island.expected_output(request) - request.num_output, 1)
    needed_s = num_left * island.cluster.decode_s(request.num_tokens)
    return request.deadlines.job_due_s - island.now < PRESSED * needed_s


# ---- requests that join the running batch ----------------------------------------------------------------------------


def _find_near(
    view: DecodeView, island: Island, config: SchedulingConfig, is_rt_known: bool, patience_s: float
) -> FindNear | None:
    """Candidate requests go before the batch; if they never stopped coming, it would never run."""
    report = view.report
    is_overdue = view.batch and view.batch_since_s <= island.now - patience_s
    if not report or view.near or is_overdue:
        return None
    if is_rt_known:
        low, high = report.min_length, report.max_length
    else:
        low, high = _node(report.batch_min_length, report.batch_max_length)
    if not (report.num_running if is_rt_known else report.batch_max_length):
        return None
    near = FindNear(
        decode=view.instance_id,
        low=low,
        high=high,
        max_blocks=max(1, int(view.num_blocks * config.near_share)),
        max_requests=max(1, int(view.hello.limits.max_num_seqs * config.near_share)),
        batch=report.batch,
    )
    return near if view.near_search.is_due(_near_what(near, island)) else None


def _near_what(near: FindNear, island: Island) -> object:
    """What there is to find: new requests, and what is near the length of the running batch."""
    return island.decode_queue.num_changes, near.low // LEAF_WIDTH, near.high // LEAF_WIDTH


def _node(low: int, high: int) -> tuple[int, int]:
    """The range of the smallest node of the quad-tree that has these lengths."""
    width = LEAF_WIDTH
    while low // width != high // width:
        width *= 4
    first = low // width * width
    return first, first + width - 1
