"""Batches of requests of similar prefix length, found in the pool's quad-tree.

A decode instance always has a next batch waiting: it is formed as soon as the earlier one is admitted. Meanwhile
pooled requests whose length lies near the running batch's are offered beside it. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from alignedserve.protocol.messages import FindNear, FormBatch
from alignedserve.scheduling import routing
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.island import DecodeView, Island


def decide(island: Island, config: SchedulingConfig) -> Iterator[FormBatch | FindNear]:
    if not len(island.decode_queue):
        return
    num_changes, patience_s = island.decode_queue.num_changes, routing.patience_s(island, config.starvation_s)
    for view in sorted(island.cluster.decodes, key=lambda view: -view.num_available_blocks):
        if not view.batch and view.batch_search.is_due(num_changes):
            view.batch_search.ask(num_changes)
            yield _form_batch(view, config, patience_s)
        elif _wants_near(view, island.now - patience_s) and view.near_search.is_due(
            _near_what(view, num_changes)
        ):
            view.near_search.ask(_near_what(view, num_changes))
            yield _find_near(view, config)


def _form_batch(view: DecodeView, config: SchedulingConfig, patience_s: float) -> FormBatch:
    """Asks for a batch with room for the longest request: one that fits into no batch would starve."""
    limits = view.hello.limits
    longest = -(-limits.max_model_len // limits.block_size)
    return FormBatch(
        decode=view.instance_id,
        max_blocks=max(longest, int(view.num_blocks * config.batch_share)),
        min_requests=config.min_batch_requests,
        max_requests=limits.max_num_seqs,
        starvation_s=patience_s,
    )


def _wants_near(view: DecodeView, overdue_since_s: float) -> bool:
    """Candidate requests go before the batch; if they never stopped coming, it would never run."""
    is_batch_overdue = view.batch and view.batch_since_s <= overdue_since_s
    return bool(view.report and view.report.num_running and not view.near and not is_batch_overdue)


def _near_what(view: DecodeView, num_changes: int) -> object:
    """What there is to find: new requests, and what is near the length of the running batch."""
    report, block_size = view.report, view.hello.limits.block_size
    assert report
    return num_changes, report.min_length // block_size, report.max_length // block_size


def _find_near(view: DecodeView, config: SchedulingConfig) -> FindNear:
    report = view.report
    assert report
    return FindNear(
        decode=view.instance_id,
        low=report.min_length,
        high=report.max_length,
        max_blocks=max(1, int(view.num_blocks * config.near_share)),
        max_requests=max(1, int(view.hello.limits.max_num_seqs * config.near_share)),
    )
