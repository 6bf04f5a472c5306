"""The way to and through prefill instances: room in the pool first, then the prompt, then its KV is pooled."""

from __future__ import annotations

from itertools import islice

from alignedserve.protocol.messages import Prefill, PrefillReport, Reserve, Reserved
from alignedserve.router import beginnings
from alignedserve.router.decode import DecodeSide
from alignedserve.router.entry import Entry, State
from alignedserve.router.fleet import ColocatedView, PrefillView
from alignedserve.router.life import Life
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
        if not (life.queue and life.fleet.pool and life.fleet.prefills):
            return
        for request in islice(life.policy.start(life), MAX_STARTS):
            entry = life.entries[request.key]
            if life.fleet.is_colocated and not entry.blocks:
                # it has room in the pool when it is evicted
                self._compute(entry)
                continue
            life.enter(entry, State.RESERVING)
            life.send_pool(Reserve(entry.key, entry.num_tokens, entry.request.request_id))

    def reserved(self, entry: Entry, reserved: Reserved) -> None:
        life = self._life
        if reserved.blocks is None:
            self._refused(entry)
            return
        entry.blocks = reserved.blocks
        views = life.fleet.prefills
        if not views or entry.is_pooled:
            life.requeue(entry)
            return
        self._compute(entry)

    def _compute(self, entry: Entry) -> None:
        """Its prompt, by some instance."""
        view, num_known = self._choose(entry)
        num_pending = max(entry.num_missing - num_known, int(LEAST_WORK * entry.num_missing), 1)
        if isinstance(view, ColocatedView):
            self._decode_side.offer(view.instance_id, [entry], is_batch=False)
        else:
            self._life.enter(entry, State.PREFILLING, view.instance_id)
            self._life.send(view.instance_id, Prefill([entry.work()]))
        view.pending.put(entry.key, num_pending, entry.is_rt)

    def _choose(self, entry: Entry) -> tuple[PrefillView | ColocatedView, int]:
        """And how much of the prompt it may have."""
        views = self._life.fleet.prefills
        names = beginnings.names(entry.request) if views[0].hello.limits.enable_prefix_caching else []

        def num_known(instance_id: InstanceId) -> int:
            view = self._life.fleet.computing(instance_id)
            # what the pool has comes from there
            return view.prompts.beginnings.num_tokens(names) if view and not entry.num_cached else 0

        chosen = self._life.policy.place(entry, views, lambda view: num_known(view.instance_id), self._life)
        view = next(view for view in views if view is chosen)
        found = view, num_known(view.instance_id)
        view.prompts.beginnings.add(names)
        return found

    def _refused(self, entry: Entry) -> None:
        """Real time takes what begun best-effort prompts hold; and one of those would wait for the others for ever."""
        life = self._life
        if not ((entry.is_rt or entry.num_cached) and life.give_way()):
            life.queue.refused(entry)
        life.requeue(entry)

    def report(self, sender: InstanceId, report: PrefillReport) -> None:
        life, view = self._life, self._life.fleet.prefill(sender)
        if view is None:
            raise RuntimeError(f"{sender} reports as a prefill instance, but is none that is up")
        life.counters.of(sender).add_report(report)
        view.num_free_blocks, view.pace = report.num_free_blocks, report.pace
        life.news(sender, report.news)
        for key, num_computed in report.progress:
            if entry := life.at(key, sender, State.PREFILLING):
                view.pending.put(key, max(entry.num_tokens - num_computed, 0), entry.is_rt)
        for key, num_tokens in report.saved:
            if entry := life.at(key, sender, State.PREFILLING):
                entry.num_cached = num_tokens
                life.requeue(entry)
