"""Batches of requests of similar prefix length, found in the pool's quad-tree.

A decode instance always has the next batch waiting: as soon as one is admitted, the next is formed. Meanwhile pooled
requests whose length lies near the running batch's are offered beside it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from alignedserve.messages import FindNear, FormBatch
from router.entry import Entry
from router.fleet import DecodeView, Fleet
from router.policies.base import Assign, BatchPolicy

# in starvation thresholds
OVERDUE = 2.0


class AlignedPolicy(BatchPolicy):
    name = "aligned"
    uses_index = True

    def decide(
        self, fleet: Fleet, pooled: Collection[Entry], num_added: int, now: float
    ) -> Sequence[FormBatch | FindNear | Assign]:
        if not pooled:
            return []
        asks: list[FormBatch | FindNear | Assign] = self._overdue(fleet, pooled, now)
        for view in sorted(fleet.decodes, key=lambda view: -view.num_unspoken_blocks):
            if self._wants_batch(view, num_added):
                view.is_batch_asked, view.batch_tried_at = True, num_added
                asks.append(self._form_batch(view))
            elif self._wants_near(view, num_added):
                view.is_near_asked, view.near_tried_at = True, num_added
                asks.append(self._find_near(view))
        return asks

    def _overdue(
        self, fleet: Fleet, pooled: Collection[Entry], now: float
    ) -> list[FormBatch | FindNear | Assign]:
        """A request that no search has chosen for long, such as one larger than a batch, is offered by itself.

        Candidate requests go before batches, so that a decode instance makes room for it.
        """
        oldest = next(iter(pooled))
        decodes = [view for view in fleet.decodes if not view.near]
        if not decodes or now - oldest.since_s < OVERDUE * self.config.starvation_s:
            return []
        return [Assign(max(decodes, key=lambda view: view.num_unspoken_blocks).instance_id, [oldest], False)]

    def _wants_batch(self, view: DecodeView, num_added: int) -> bool:
        return not view.batch and not view.is_batch_asked and view.batch_tried_at != num_added

    def _form_batch(self, view: DecodeView) -> FormBatch:
        return FormBatch(
            decode=view.instance_id,
            max_blocks=max(1, int(view.num_blocks * self.config.batch_share)),
            min_requests=self.config.min_batch_requests,
            max_requests=view.hello.limits.max_num_seqs,
        )

    def _wants_near(self, view: DecodeView, num_added: int) -> bool:
        return bool(
            view.report
            and view.report.num_running
            and not view.near
            and not view.is_near_asked
            and view.near_tried_at != num_added
        )

    def _find_near(self, view: DecodeView) -> FindNear:
        report = view.report
        assert report
        return FindNear(
            decode=view.instance_id,
            low=report.min_length,
            high=report.max_length,
            max_blocks=max(1, int(view.num_blocks * self.config.near_share)),
            max_requests=max(1, int(view.hello.limits.max_num_seqs * self.config.near_share)),
        )
