"""The way to and through prefill instances: room in the pool first, then the prompt, then its KV is pooled."""

from __future__ import annotations

from itertools import islice

from alignedserve.protocol.messages import Prefill, PrefillReport, Reserve, Reserved
from alignedserve.router import prefix_affinity
from alignedserve.router.cluster_state import ColocatedView, PrefillView
from alignedserve.router.decode import DecodeSide
from alignedserve.router.life import Life
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.types import InstanceId

# What an instance may have of a prompt is no work for it. But this share of the prompt counts at least: it has room in
# the pool from then on, and goes before whatever comes later.
LEAST_WORK = 0.125
# Of one event. The pool's answers are the next ones.
MAX_STARTS = 16


class PrefillSide:
    def __init__(self, life: Life, decode_side: DecodeSide) -> None:
        self._life = life
        self._decode_side = decode_side

    def start(self) -> None:
        life = self._life
        if not (life.prefill_queue and life.cluster.pool and life.cluster.prefills):
            return
        for request in islice(life.policy.start(life), MAX_STARTS):
            state = life.requests[request.key]
            if life.cluster.is_colocated and not state.blocks:
                # it has room in the pool when it is evicted
                self._compute(state)
                continue
            life.enter(state, Phase.RESERVING)
            life.send_pool(Reserve(state.key, state.num_tokens, state.request.request_id))

    def reserved(self, state: RequestState, reserved: Reserved) -> None:
        life = self._life
        if reserved.blocks is None:
            self._refused(state)
            return
        state.blocks = reserved.blocks
        views = life.cluster.prefills
        if not views or state.is_pooled:
            life.requeue(state)
            return
        self._compute(state)

    def _compute(self, state: RequestState) -> None:
        """Its prompt, by some instance."""
        view, num_known = self._choose(state)
        num_pending = max(state.num_missing - num_known, int(LEAST_WORK * state.num_missing), 1)
        if isinstance(view, ColocatedView):
            self._decode_side.offer(view.instance_id, [state], is_batch=False)
        else:
            self._life.enter(state, Phase.PREFILLING, view.instance_id)
            self._life.send(view.instance_id, Prefill([state.work()]))
        view.pending.put(state.key, num_pending, state.is_rt)

    def _choose(self, state: RequestState) -> tuple[PrefillView | ColocatedView, int]:
        """And how much of the prompt it may have."""
        views = self._life.cluster.prefills
        hashes = prefix_affinity.block_hashes(state.request) if views[0].hello.limits.shares_prefixes else []

        def num_known(instance_id: InstanceId) -> int:
            view = self._life.cluster.computing(instance_id)
            # what the pool has comes from there
            return (
                view.prompts.prefix_affinity.num_cached_tokens(hashes) if view and not state.num_cached else 0
            )

        chosen = self._life.policy.place(state, views, lambda view: num_known(view.instance_id), self._life)
        view = next(view for view in views if view is chosen)
        found = view, num_known(view.instance_id)
        view.prompts.prefix_affinity.add(hashes)
        return found

    def _refused(self, state: RequestState) -> None:
        """Real time takes what begun best-effort prompts hold; and one of those would wait for the others for ever."""
        life = self._life
        if not ((state.is_rt or state.num_cached) and life.unpin_all()):
            life.prefill_queue.refused(state)
        life.requeue(state)

    def report(self, sender: InstanceId, report: PrefillReport) -> None:
        life, view = self._life, self._life.cluster.prefill(sender)
        if view is None:
            raise RuntimeError(f"{sender} reports as a prefill instance, but is none that is up")
        life.counters.of(sender).add_report(report)
        view.num_free_blocks, view.pace = report.num_free_blocks, report.pace
        life.add_tokens(sender, report.news)
        for key, num_computed in report.progress:
            if state := life.find(key, sender, Phase.PREFILLING):
                view.pending.put(key, max(state.num_tokens - num_computed, 0), state.is_rt)
        for key, num_tokens in report.saved:
            if state := life.find(key, sender, Phase.PREFILLING):
                state.num_cached = num_tokens
                life.requeue(state)
