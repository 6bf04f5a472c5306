"""The way to and through prefill instances: room in the pool first, then the prompt, then its KV is pooled."""

from __future__ import annotations

from alignedserve.messages import Prefill, PrefillReport, Reserve, Reserved
from alignedserve.types import InstanceId
from router.entry import Entry, State
from router.life import Life


class PrefillSide:
    def __init__(self, life: Life) -> None:
        self._life = life

    def start(self) -> None:
        life = self._life
        if not (life.queue and life.fleet.pool and life.fleet.prefills):
            return
        num_reserving = sum(entry.num_missing for entry in life.reserving.values())
        for entry in life.queue.startable(life.fleet.prefills, num_reserving, life.config.prefill_window):
            life.enter(entry, State.RESERVING)
            life.send_pool(Reserve(entry.key, entry.num_tokens, entry.request.request_id))

    def reserved(self, entry: Entry, reserved: Reserved) -> None:
        life = self._life
        if reserved.blocks is None:
            life.queue.pool_is_full = True
            life.requeue(entry)
            return
        entry.blocks = reserved.blocks
        views = life.fleet.prefills
        if not views:
            life.requeue(entry)
            return
        view = min(views, key=lambda view: view.num_pending)
        life.enter(entry, State.PREFILLING, view.instance_id)
        life.send(view.instance_id, Prefill([entry.work()]))

    def report(self, sender: InstanceId, report: PrefillReport) -> None:
        life, view = self._life, self._life.fleet.prefill(sender)
        if view is None:
            raise RuntimeError(f"{sender} reports as a prefill instance, but is none that is up")
        life.counters.of(sender).add_moved(report.moved)
        view.num_free_blocks = report.num_free_blocks
        life.news(sender, report.news)
        for key, num_computed in report.progress:
            if entry := life.at(key, sender, State.PREFILLING):
                view.pending[key] = max(entry.num_tokens - num_computed, 0)
        for key, num_tokens in report.saved:
            if entry := life.at(key, sender, State.PREFILLING):
                entry.num_cached = num_tokens
                life.requeue(entry)
