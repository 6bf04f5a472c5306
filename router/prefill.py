"""The way to and through prefill instances: room in the pool first, then the prompt, then its KV is pooled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import islice

from alignedserve.messages import Prefill, PrefillReport, Reserve, Reserved
from alignedserve.mix.lately import Lately
from alignedserve.router import beginnings, placing
from alignedserve.router.entry import Entry, State
from alignedserve.router.fleet import PrefillView
from alignedserve.router.life import Life
from alignedserve.router.queue import Room
from alignedserve.types import InstanceId

# While real time comes and goes, prompts of best effort are not computed further ahead than this, in requests that are
# ready for each slot of the decode instances: where none of them is computed, real time waits for nobody.
STOCK = 1.0
# What an instance may have of a prompt is no work for it. But this share of the prompt counts at least: it has room in
# the pool from then on, and goes before whatever comes later.
LEAST_WORK = 0.125
# Of one event. The pool's answers are the next ones.
MAX_STARTS = 16


class PrefillSide:
    def __init__(self, life: Life) -> None:
        self._life = life
        # when it came, of late
        self._real_time = Lately()

    def start(self) -> None:
        life = self._life
        if not (life.queue and life.fleet.pool and life.fleet.prefills):
            return
        startable = life.queue.startable(*self._rooms(), life.now, self._may_start)
        for entry in islice(startable, MAX_STARTS):
            life.enter(entry, State.RESERVING)
            life.send_pool(Reserve(entry.key, entry.num_tokens, entry.request.request_id))

    def _rooms(self) -> tuple[Room, Room]:
        """In the windows of work ahead of all instances together, for either class."""
        life = self._life
        if not life.discipline.has_deadlines:
            room = self._window(1.0).less(*self._ahead(True)).less(*self._ahead(False))
            return room, room
        return (
            self._window(1.0).less(*self._ahead(True)),
            self._window(self._share_for_be()).less(*self._ahead(False)),
        )

    def _window(self, share: float) -> Room:
        """A share of so many iterations. However short prompts are, there are not more in them than instances run at
        once."""
        life = self._life
        limits = [view.hello.limits for view in life.fleet.prefills]
        num_iterations = life.config.prefill_window
        return Room(
            int(num_iterations * share * sum(each.max_num_batched_tokens for each in limits)),
            math.ceil(num_iterations * share * sum(each.max_num_seqs for each in limits)),
        )

    def _ahead(self, is_rt: bool) -> tuple[int, int]:
        """Tokens and requests that were started and are not computed."""
        life = self._life
        tallies = [life.reserving, *(view.pending for view in life.fleet.prefills)]
        return sum(each.sum(is_rt) for each in tallies), sum(each.count(is_rt) for each in tallies)

    def _may_start(self, entry: Entry) -> bool:
        life = self._life
        if entry.is_rt or not life.discipline.has_deadlines:
            return True
        return self._share_for_be() > 0 and life.memory.has_room_for(
            entry, is_scarce=life.queue.is_rt_refused
        )

    def _share_for_be(self) -> float:
        """Of the prefill instances: the fewer, the more decode instances have to choose from, or will have."""
        life = self._life
        if not self._is_rt_known:
            return 1.0
        views = life.fleet.decodes
        most = STOCK * sum(view.hello.limits.max_num_seqs for view in views)
        num_there = sum(len(view.be_running) + len(view.be_promised) for view in views)
        num_ready = life.memory.num_be - len(life.held) - num_there
        num_prefills = len(life.fleet.prefills)
        return math.ceil(num_prefills * (1 - num_ready / most)) / num_prefills if num_ready < most else 0.0

    @property
    def _is_rt_known(self) -> bool:
        return self._real_time.least(math.inf, self._life.now) < math.inf

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
        view, num_known = self._choose(entry, views)
        life.enter(entry, State.PREFILLING, view.instance_id)
        num_pending = max(entry.num_missing - num_known, int(LEAST_WORK * entry.num_missing), 1)
        view.pending.put(entry.key, num_pending, entry.is_rt)
        life.send(view.instance_id, Prefill([entry.work()]))

    def _choose(self, entry: Entry, views: Sequence[PrefillView]) -> tuple[PrefillView, int]:
        """And how much of the prompt it may have."""
        life = self._life
        names = beginnings.names(entry.request) if views[0].hello.limits.shares_prefixes else []

        def num_known(view: PrefillView) -> int:
            # what the pool has comes from there
            return 0 if entry.num_cached else view.beginnings.num_tokens(names)

        if life.discipline.has_deadlines and entry.is_rt:
            self._real_time.see(0.0, life.now)
            view = placing.for_real_time(views, num_known)
        elif life.discipline.has_deadlines and self._is_rt_known:
            view = placing.for_best_effort(views, life.config.prefill_window)
        else:
            view = placing.for_any(views, num_known)
        found = view, num_known(view)
        view.beginnings.add(names)
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
