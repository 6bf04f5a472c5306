"""The way to and through decode instances: chosen in the pool, staged, offered, admitted, evicted."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.messages import (
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
from alignedserve.types import InstanceId, RequestKey
from router.entry import Entry, State
from router.fleet import DecodeView, PrefillView
from router.life import Life
from router.policies import Assign

# A request goes on while it waits for its way out.
EVICT_SLACK_BLOCKS = 2


class DecodeSide:
    def __init__(self, life: Life) -> None:
        self._life = life

    # ---- to a decode instance ----

    def assign(self) -> None:
        life = self._life
        if not life.fleet.pool:
            return
        for ask in life.policy.decide(life.fleet, life.pooled, life.now):
            if isinstance(ask, Assign):
                if life.policy.uses_index:
                    for entry in ask.entries:
                        life.commit(entry, is_candidate=False)
                self._assign(ask.decode, ask.entries, ask.is_batch)
            else:
                life.send_pool(ask)

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

    def _assign(self, decode: InstanceId, entries: Sequence[Entry], is_batch: bool) -> None:
        """Staged is what the emptiest buffer has room for; a candidate that waited for room there might be what an
        idle decode instance waits for. The others are fetched from the pool."""
        view = self._life.fleet.decode(decode)
        if entries and view and is_batch and not view.batch:
            view.is_batch_begun = False
        prefills = self._life.fleet.prefills if self._life.config.link != "host" else []
        stager = max(prefills, key=lambda view: view.num_free_staging_blocks, default=None)
        staged = self._stage(stager, decode, entries, is_batch) if stager else set()
        if fetched := [entry for entry in entries if entry.key not in staged]:
            self._offer(decode, fetched, is_batch, source=None)

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
            entry.staged_at, entry.staged_for, entry.is_in_batch = stager.instance_id, decode, is_batch
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
                self._offer(decode, entries, is_batch, source=stager)
            else:
                for entry in entries:
                    self._life.recall(entry)

    def _offer(
        self, decode: InstanceId, entries: Sequence[Entry], is_batch: bool, source: InstanceId | None
    ) -> None:
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
            (view.batch if is_batch else view.near)[entry.key] = len(entry.blocks) + 1

    # ---- on a decode instance ----

    def report(self, sender: InstanceId, report: DecodeReport) -> None:
        life, view = self._life, self._life.fleet.decode(sender)
        if view is None:
            raise RuntimeError(f"{sender} reports as a decode instance, but is none that is up")
        counters = life.counters.of(sender)
        counters.add_moved(report.moved)
        view.report, view.num_free_blocks = report, report.num_free_blocks
        self._admitted(view, report.admitted)
        life.news(sender, report.news)
        for key in report.wants_evicted:
            if entry := life.at(key, sender, State.RUNNING):
                counters.num_preemptions += 1
                life.enter(entry, State.MAKING_ROOM, sender)
                self.make_room(entry)
        for key, num_tokens in report.evicted:
            if entry := life.at(key, sender, State.EVICTING):
                counters.num_evictions += 1
                entry.num_cached = num_tokens
                life.requeue(entry)
        for key in report.withdrawn:
            if entry := life.at(key, sender, State.OFFERED):
                life.recall(entry, gone_from=sender)

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
                entry.staged_at = None
        for stager, staged_keys in unstaged.items():
            self.unstaged(stager, staged_keys)
        if entries:
            self._life.send_pool(MakeSpare([entry.key for entry in entries]))

    def unstaged(self, stager: InstanceId, keys: list[RequestKey]) -> None:
        if view := self._life.fleet.prefill(stager):
            for key in keys:
                view.staging.pop(key, None)
            self._life.send(stager, Unstage(keys))

    def make_room(self, entry: Entry) -> None:
        pool, view = self._life.fleet.pool, self._life.fleet.decode(entry.place)
        if pool and view:
            block_size = view.hello.limits.block_size
            most = pool.hello.limits.num_blocks * block_size
            num_tokens = min(entry.num_tokens + EVICT_SLACK_BLOCKS * block_size, most)
            self._life.send_pool(Reserve(entry.key, num_tokens, entry.request.request_id))

    def made_room(self, entry: Entry, reserved: Reserved) -> None:
        """Without room its KV is lost, and computed again when there is some."""
        if reserved.blocks is None:
            self._life.recall(entry)
            return
        entry.blocks = reserved.blocks
        self._life.enter(entry, State.EVICTING, entry.place)
        self._life.send(entry.place, Evict(entry.key, entry.blocks, entry.num_cached))
