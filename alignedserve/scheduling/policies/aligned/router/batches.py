"""Asks the pool's quad-tree for batches of requests of similar prefix length. Pure.

**With recent real time (RT)**, a decode instance always has a next batch waiting. It is formed as soon as the previous
one is admitted. Meanwhile the instance is offered pooled requests with lengths in the range of its running requests.
Batches mix there, because RT does not wait for requests of its own length.

**With best effort (BE) alone**, batches pay if they save more of the iterations' time than they cost (`Likeness`).
Otherwise each request is assigned as soon as it fits. If they pay, an instance runs one batch at a time. Pooled
requests of similar length join it while there are any, and the others are held back. The next batch replaces it when

- the running batch has shrunk and no more requests join it,
- or a request has been held back for long,
- or the window of a job leaves hardly any time.

The rest of the old batch returns to the pool with its KV, and joins a later batch of similar length.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from alignedserve.protocol.messages import FindNear, FormBatch
from alignedserve.scheduling import routing
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import Assign, DecodeView, Island, RoutedRequest
from alignedserve.timing.cost import CostModel

# A batch is replaced when the running requests fill at most this share of what the waiting ones would fill. A larger
# share moves more KV, and a smaller one leaves iterations emptier. This value and the next two are tuned in simulation:
# OPT-13B on an A100, documents with lengths from one distribution and from two.
SWITCH = 0.65
# Share of the instance's blocks that a replacing batch fills, if enough requests wait.
REPLACING_SHARE = 0.9
# The longest time that BE is held back, as a multiple of `routing.patience_s`.
HELD_BACK = 20.0
# A window is pressing when it leaves less than this multiple of the time that the request needs: half is for waiting.
PRESSED = 2.0
# The number of waiting requests, oldest first, with windows that are checked.
MAX_LOOKED_AT = 64
# What batches of BE alone cost, as a share of its throughput: they leave memory unused, and move KV. It was 4 to 7 % in
# simulation (OPT-13B on an A100, documents).
BATCHES_COST = 0.05
# The number of changes of the queue after which it is computed again whether batches pay.
CHANGES = 8
# Width of the quad-tree's leaves, in tokens. Each level above is four times as wide.
LEAF_WIDTH = 16


class Likeness:
    """Whether batches of BE alone pay, with the attention kernel of the cost model. Without one, they do."""

    def __init__(self) -> None:
        self._num_changes, self._pays = -CHANGES, False

    def pays(self, island: Island) -> bool:
        queue, decodes = island.decode_queue, island.cluster.decodes
        cost = decodes[0].hello.cost if decodes else None
        if cost is None:
            return True
        # What waited may have been assigned in the same event.
        if len(queue) and queue.num_changes >= self._num_changes + CHANGES:
            self._num_changes = queue.num_changes
            lengths = sorted(request.num_tokens for request in islice(queue, MAX_LOOKED_AT))
            # If they have paid, it takes more to give them up.
            least = BATCHES_COST / 2 if self._pays else BATCHES_COST
            self._pays = island.common_share + _gain(cost, lengths) > least
        return self._pays


def _gain(cost: CostModel, lengths: Sequence[int]) -> float:
    """Returns the share of their time that iterations save if requests of similar length run together. `lengths`: in
    order."""
    half = len(lengths) // 2
    alike_s = cost.iteration([], lengths[:half]) + cost.iteration([], lengths[half:])
    return 1.0 - alike_s / (cost.iteration([], lengths[::2]) + cost.iteration([], lengths[1::2]))


def assign(island: Island) -> list[Assign]:
    """Assigns BE in order of arrival: requests with a pressing window first, and answers beyond their predicted length
    last. An instance with a candidate batch gets no others before it, because they would be admitted first."""
    views = [view for view in island.cluster.decodes if not view.batch]
    if not any(view.num_available_slots > 0 and view.num_available_blocks > 0 for view in views):
        return []
    return routing.assign_in_order(_in_order(island.decode_queue, island), views)


def offer_one_each(island: Island, config: SchedulingConfig) -> Iterator[Assign]:
    """Offers a BE request to each instance that has none waiting, so that BE gets its share while RT is late. A batch
    would take RT that is lost first, and so make others late. A large one would block BE there, so it goes where it
    fits, or last, or when it has waited long, and then to one instance at a time."""
    queue, decodes = island.decode_queue, island.cluster.decodes
    views = [view for view in decodes if not view.be_promised]
    if not views or len(queue) == len(queue.real_time):
        return
    is_blocked = any(view.be_promised and view.num_available_blocks < 0 for view in decodes)
    waiting = [*islice(_in_order((request for request in queue if not request.is_rt), island), MAX_LOOKED_AT)]
    long_s = HELD_BACK * routing.patience_s(island, config.starvation_s)
    for view in sorted(views, key=lambda view: (view.num_available_slots <= 0, -view.num_available_blocks)):
        most = max(config.near_share * view.num_blocks, view.num_available_blocks)
        fitting = (
            request
            for request in waiting
            if view.blocks_to_run(request) <= most
            or (not is_blocked and request.since_s + long_s <= island.now)
        )
        if chosen := next(fitting, None) or min(waiting, key=lambda each: each.num_blocks, default=None):
            is_blocked |= view.blocks_to_run(chosen) > most
            waiting.remove(chosen)
            yield Assign(view.instance_id, [chosen])


def _in_order(requests: Iterable[RoutedRequest], island: Island) -> Iterator[RoutedRequest]:
    def place(request: RoutedRequest) -> tuple[bool, float]:
        return not _presses(request, island), request.demotion(island.now)

    waiting = iter(requests)
    yield from sorted(islice(waiting, MAX_LOOKED_AT), key=place)
    yield from waiting


def decide(island: Island, config: SchedulingConfig, is_rt_known: bool) -> Iterator[FormBatch | FindNear]:
    """Yields the searches that are due now, at most one per decode instance. `is_rt_known`: RT arrived recently."""
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
    """Returns the search for the next batch, or None if none is due. The batch has room for at least the longest
    possible request: a request that fits into no batch would starve."""
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
        fair_share=-(-len(island.decode_queue) // len(island.cluster.decodes)),
    )


def _is_shrunk(view: DecodeView, island: Island) -> bool:
    """Returns whether the instance is much emptier than the waiting requests could fill it."""
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
    """Returns whether a batch is on its way to any instance. It may contain the pressing request, so that no other
    batch has to be replaced."""
    return any(view.batch or view.batch_search.is_asked for view in island.cluster.decodes)


def _is_pressing(island: Island, patience_s: float) -> bool:
    """Returns whether BE must not be held back any longer: the oldest request has waited for `patience_s` seconds, or
    the window of a request is pressing."""
    queue = island.decode_queue
    if next(iter(queue)).since_s + patience_s <= island.now:
        return True
    return any(_presses(request, island) for request in islice(queue, MAX_LOOKED_AT))


def _presses(request: RoutedRequest, island: Island) -> bool:
    """Returns whether the window of the request's job leaves it no time to wait."""
    if request.deadlines.job_due_s == math.inf:
        return False
    num_left = max(island.expected_output(request) - request.num_output, 1)
    needed_s = num_left * island.cluster.decode_s(request.num_tokens)
    return request.deadlines.job_due_s - island.now < PRESSED * needed_s


# ---- requests that join the running batch ----------------------------------------------------------------------------


def _find_near(
    view: DecodeView, island: Island, config: SchedulingConfig, is_rt_known: bool, patience_s: float
) -> FindNear | None:
    """Returns the search for candidate requests, or None if none is due. None is due while a candidate batch is
    overdue: candidate requests are admitted before it, and an endless supply of them would starve it."""
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
    """Returns a value that changes when the search might find something new: with the queue, or with the range of
    lengths."""
    return island.decode_queue.num_changes, near.low // LEAF_WIDTH, near.high // LEAF_WIDTH


def _node(low: int, high: int) -> tuple[int, int]:
    """Returns the range of lengths of the smallest quad-tree node that contains `low` and `high`, both inclusive."""
    width = LEAF_WIDTH
    while low // width != high // width:
        width *= 4
    first = low // width * width
    return first, first + width - 1
