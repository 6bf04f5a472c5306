"""The way to and through decode instances: chosen in the pool, staged, offered, admitted, evicted."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.protocol.messages import (
    Candidates,
    DecodeReport,
    Evict,
    MakeSpare,
    Offer,
    Reserve,
    Reserved,
    Stage,
    Unstage,
)
from alignedserve.router.entry import Entry, State
from alignedserve.router.fleet import ColocatedView, DecodeView, PrefillView
from alignedserve.router.life import Life
from alignedserve.scheduling.island import Assign
from alignedserve.types import InstanceId, RequestKey

# Victims without room in the pool wait for it while others run. When nothing has run for so long, or for so many
# iterations, one of them is computed again later.
STANDSTILL_S = 1.0
# A colocated instance computes it again itself, and need not wait for others to have room for its prompt.
STANDSTILL_COLOCATED_S = 0.1
STANDSTILL_ITERATIONS = 4


class DecodeSide:
    def __init__(self, life: Life) -> None:
        self._life = life

    # ---- to a decode instance ----

    def assign(self) -> None:
        life = self._life
        if not life.fleet.pool:
            return
        if life.may_have_room:
            life.may_have_room = False
            self._ask_again()
        for ask in life.policy.decide(life):
            if isinstance(ask, Assign):
                self._take(ask)
            else:
                life.send_pool(ask)

    def _take(self, ask: Assign) -> None:
        life = self._life
        entries = [entry for request in ask.requests if (entry := life.pooled.get(request.key))]
        if len(entries) < len(ask.requests):
            raise RuntimeError(f"{ask.decode}: is offered requests that are not in the pool, or one twice")
        for entry in entries:
            life.commit(entry, is_candidate=False)
        life.counters.num_express += ask.is_urgent * len(entries)
        self._assign(ask.decode, entries, ask.is_batch, ask.is_urgent)

    def candidates(self, found: Candidates) -> None:
        """The pool's answer: these are no candidates any more."""
        life = self._life
        entries = [entry for key in found.keys if (entry := life.pooled.get(key))]
        view = life.fleet.decode(found.decode)
        if view is None:
            for entry in entries:
                life.commit(entry, is_candidate=True)
            return
        search = view.batch_search if found.is_batch else view.near_search
        search.answered(has_found=bool(found.keys))
        self._assign(found.decode, entries, found.is_batch)

    def _assign(
        self, decode: InstanceId, entries: Sequence[Entry], is_batch: bool, is_urgent: bool = False
    ) -> None:
        """Staged is what the emptiest buffer has room for; a candidate that waited for room there might be what an
        idle decode instance waits for. The others are fetched from the pool, as are urgent ones where others are
        being staged already or prompts have taken the room."""
        view = self._life.fleet.decode(decode)
        if entries and view and is_batch and not view.batch:
            view.is_batch_begun = False
        prefills = self._life.fleet.prefills if self._life.config.link != "host" else []
        stagers = [view for view in prefills if isinstance(view, PrefillView)]
        stager = max(stagers, key=lambda view: view.num_free_staging_blocks, default=None)
        if stager and is_urgent and not _has_room_at_once(stager, entries):
            stager = None
        staged = self._stage(stager, decode, entries, is_batch) if stager else set()
        if fetched := [entry for entry in entries if entry.key not in staged]:
            self.offer(decode, fetched, is_batch, source=None)

    def _stage(
        self, stager: PrefillView, decode: InstanceId, entries: Sequence[Entry], is_batch: bool
    ) -> set[RequestKey]:
        """Those that fit into the buffer, in order."""
        works, num_free = [], stager.num_free_staging_blocks
        for entry in entries:
            num_blocks = -(-entry.num_cached // stager.hello.limits.block_size)
            if num_blocks > num_free:
                continue
            num_free -= num_blocks
            self._life.enter(entry, State.STAGED, stager.instance_id)
            entry.is_in_batch = is_batch
            self._life.staged(entry, stager.instance_id, decode)
            stager.staging[entry.key] = num_blocks
            self._promise(decode, entry, is_batch)
            works.append(entry.work())
        if works:
            self._life.send(stager.instance_id, Stage(decode, works))
        return {work.request.key for work in works}

    def staged(self, stager: InstanceId, keys: Sequence[RequestKey]) -> None:
        """Their KV is in a prefill instance's buffer: on to the decode instance they were chosen for."""
        groups: dict[tuple[InstanceId | None, bool], list[Entry]] = {}
        for key in keys:
            if entry := self._life.at(key, stager, State.STAGED):
                groups.setdefault((entry.staged_for, entry.is_in_batch), []).append(entry)
        for (decode, is_batch), entries in groups.items():
            if decode and self._life.fleet.decode(decode):
                self.offer(decode, entries, is_batch, source=stager)
            else:
                for entry in entries:
                    self._life.recall(entry)

    def offer(
        self,
        decode: InstanceId,
        entries: Sequence[Entry],
        is_batch: bool,
        source: InstanceId | None = None,
    ) -> None:
        """What no prefill instance has staged is fetched from the pool, or computed."""
        for entry in entries:
            self._life.enter(entry, State.OFFERED, decode)
            self._promise(decode, entry, is_batch)
        stager = self._life.fleet.prefill(source)
        address = stager.hello.link if stager else ""
        self._life.send(decode, Offer([entry.work() for entry in entries], is_batch, source, address))

    def _promise(self, decode: InstanceId, entry: Entry, is_batch: bool) -> None:
        if view := self._life.fleet.decode(decode):
            if is_batch and not view.batch:
                view.batch_since_s = self._life.now
            num_blocks = entry.num_blocks or -(-entry.num_tokens // view.hello.limits.block_size)
            needed = (view.batch if is_batch else view.near)[entry.key] = num_blocks + 1
            if not entry.is_rt:
                view.be_promised[entry.key] = needed

    # ---- on a decode instance ----

    def report(self, sender: InstanceId, report: DecodeReport) -> None:
        life, view = self._life, self._life.fleet.decode(sender)
        if view is None:
            raise RuntimeError(f"{sender} reports as a decode instance, but is none that is up")
        counters = life.counters.of(sender)
        counters.add_report(report)
        view.report, view.num_free_blocks = report, report.num_free_blocks
        self._admitted(view, report.admitted)
        life.news(sender, report.news)
        view.pace = report.pace
        if isinstance(view, ColocatedView):
            for key, num_computed in report.progress:
                if key in view.pending and (entry := life.entries.get(key)):
                    view.pending.put(key, max(entry.num_tokens - num_computed, 0), entry.is_rt)
        if report.news:
            view.progress_s = life.now
        self._victims(view, report.wants_evicted)
        for key, num_tokens in report.evicted:
            if entry := life.at(key, sender, State.EVICTING):
                counters.num_evictions += 1
                life.counters.num_evicted_for_rt += view.awaits_rt and not entry.is_rt
                entry.num_cached = num_tokens
                life.requeue(entry)

    def _victims(self, view: DecodeView, keys: Sequence[RequestKey]) -> None:
        life, sender = self._life, view.instance_id
        for key in view.refused.keys() - keys:
            del view.refused[key]
            if entry := life.at(key, sender, State.MAKING_ROOM):
                life.enter(entry, State.RUNNING, sender)
                life.send_pool(MakeSpare([key]))
        for key in keys:
            if entry := life.at(key, sender, State.RUNNING):
                life.counters.of(sender).num_preemptions += 1
                life.enter(entry, State.MAKING_ROOM, sender)
                self.make_room(entry)

    def _admitted(self, view: DecodeView, keys: Sequence[RequestKey]) -> None:
        sender = view.instance_id
        entries = [entry for key in keys if (entry := self._life.at(key, sender, State.OFFERED))]
        if not view.is_batch_begun and any(entry.key in view.batch for entry in entries):
            view.is_batch_begun = True
            self._life.counters.of(sender).num_batch_switches += 1
        unstaged: dict[InstanceId, list[RequestKey]] = {}
        for entry in entries:
            self._life.enter(entry, State.RUNNING, sender)
            if entry.staged_at:
                unstaged.setdefault(entry.staged_at, []).append(entry.key)
                self._life.unstaged(entry)
        for stager, staged_keys in unstaged.items():
            self.unstaged(stager, staged_keys)
        if pooled := [entry.key for entry in entries if entry.blocks]:
            self._life.send_pool(MakeSpare(pooled))

    def unstaged(self, stager: InstanceId, keys: list[RequestKey]) -> None:
        if view := self._life.fleet.prefill(stager):
            for key in keys:
                view.staging.pop(key, None)
            self._life.send(stager, Unstage(keys))

    def make_room(self, entry: Entry) -> None:
        pool, memory = self._life.fleet.pool, self._life.memory
        if pool:
            most = pool.hello.limits.num_blocks * pool.hello.limits.block_size
            num_tokens = min(memory.tokens_to_evict(entry), most)
            self._life.send_pool(Reserve(entry.key, num_tokens, entry.request.request_id))

    def made_room(self, entry: Entry, reserved: Reserved) -> None:
        """Without room it stays where it is, with its KV, and goes on if it can."""
        if reserved.blocks is None:
            if self._life.give_way():
                self.make_room(entry)
            elif view := self._life.fleet.decode(entry.place):
                view.refused[entry.key] = None
            return
        if view := self._life.fleet.decode(entry.place):
            view.refused.pop(entry.key, None)
        entry.blocks = reserved.blocks
        self._life.enter(entry, State.EVICTING, entry.place)
        self._life.send(entry.place, Evict(entry.key, entry.blocks, entry.num_cached))

    def _ask_again(self) -> None:
        """For those that found no room."""
        for view in self._life.fleet.decodes:
            victims = [
                entry
                for key in view.refused
                if (entry := self._life.at(key, view.instance_id, State.MAKING_ROOM))
            ]
            view.refused = {entry.key: None for entry in victims}
            if victims and self._stands_still(view, victims):
                self._give_up(view, victims)
            else:
                for entry in victims:
                    self.make_room(entry)

    def _stands_still(self, view: DecodeView, victims: Sequence[Entry]) -> bool:
        iteration_s = view.report.duration_s if view.report else 0.0
        least_s = STANDSTILL_COLOCATED_S if isinstance(view, ColocatedView) else STANDSTILL_S
        patience_s = max(least_s, STANDSTILL_ITERATIONS * iteration_s)
        since_s = max(view.progress_s, max(entry.since_s for entry in victims))
        return self._life.now - since_s > patience_s

    def _give_up(self, view: DecodeView, victims: Sequence[Entry]) -> None:
        """The one with least to compute again: all wait for each other, and nobody else has room to give."""
        victim = min(victims, key=lambda entry: (entry.is_rt, entry.num_tokens))
        del view.refused[victim.key]
        view.progress_s = self._life.now
        self._life.counters.num_recomputed += 1
        self._life.recall(victim)


def _has_room_at_once(stager: PrefillView, entries: Sequence[Entry]) -> bool:
    needed = sum(len(entry.blocks) for entry in entries)
    return not stager.staging and needed <= min(stager.num_free_blocks, stager.num_free_staging_blocks)
