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
from alignedserve.router.cluster_state import ColocatedView, DecodeView, PrefillView
from alignedserve.router.life import Life
from alignedserve.router.request_state import Phase, RequestState
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
        if not life.cluster.pool:
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
        states = [state for request in ask.requests if (state := life.decode_queue.get(request.key))]
        if len(states) < len(ask.requests):
            raise RuntimeError(f"{ask.decode}: is offered requests that are not in the pool, or one twice")
        for state in states:
            life.commit(state, is_candidate=False)
        life.counters.num_fast_path += ask.is_urgent * len(states)
        self._assign(ask.decode, states, ask.is_batch, ask.is_urgent)

    def candidates(self, found: Candidates) -> None:
        """The pool's answer: these are no candidates any more."""
        life = self._life
        states = [state for key in found.keys if (state := life.decode_queue.get(key))]
        view = life.cluster.decode(found.decode)
        if view is None:
            for state in states:
                life.commit(state, is_candidate=True)
            return
        search = view.batch_search if found.is_batch else view.near_search
        search.answered(has_found=bool(found.keys))
        self._assign(found.decode, states, found.is_batch)

    def _assign(
        self, decode: InstanceId, states: Sequence[RequestState], is_batch: bool, is_urgent: bool = False
    ) -> None:
        """Staged is what the emptiest buffer has room for; a candidate that waited for room there might be what an
        idle decode instance waits for. The others are fetched from the pool, as are urgent ones where others are
        being staged already or prompts have taken the room."""
        view = self._life.cluster.decode(decode)
        if states and view and is_batch and not view.batch:
            view.is_batch_begun = False
        prefills = self._life.cluster.prefills if self._life.config.link != "host" else []
        stagers = [view for view in prefills if isinstance(view, PrefillView)]
        stager = max(stagers, key=lambda view: view.num_free_staging_blocks, default=None)
        if stager and is_urgent and not _has_room_at_once(stager, states):
            stager = None
        staged = self._stage(stager, decode, states, is_batch) if stager else set()
        if fetched := [state for state in states if state.key not in staged]:
            self.offer(decode, fetched, is_batch, source=None)

    def _stage(
        self, stager: PrefillView, decode: InstanceId, states: Sequence[RequestState], is_batch: bool
    ) -> set[RequestKey]:
        """Those that fit into the buffer, in order."""
        works, num_free = [], stager.num_free_staging_blocks
        for state in states:
            num_blocks = -(-state.num_cached // stager.hello.limits.block_size)
            if num_blocks > num_free:
                continue
            num_free -= num_blocks
            self._life.enter(state, Phase.STAGED, stager.instance_id)
            state.is_in_batch = is_batch
            self._life.staged(state, stager.instance_id, decode)
            stager.staging[state.key] = num_blocks
            self._promise(decode, state, is_batch)
            works.append(state.work())
        if works:
            self._life.send(stager.instance_id, Stage(decode, works))
        return {work.request.key for work in works}

    def staged(self, stager: InstanceId, keys: Sequence[RequestKey]) -> None:
        """Their KV is in a prefill instance's buffer: on to the decode instance they were chosen for."""
        groups: dict[tuple[InstanceId | None, bool], list[RequestState]] = {}
        for key in keys:
            if state := self._life.find(key, stager, Phase.STAGED):
                groups.setdefault((state.staged_for, state.is_in_batch), []).append(state)
        for (decode, is_batch), states in groups.items():
            if decode and self._life.cluster.decode(decode):
                self.offer(decode, states, is_batch, source=stager)
            else:
                for state in states:
                    self._life.recall(state)

    def offer(
        self,
        decode: InstanceId,
        states: Sequence[RequestState],
        is_batch: bool,
        source: InstanceId | None = None,
    ) -> None:
        """What no prefill instance has staged is fetched from the pool, or computed."""
        for state in states:
            self._life.enter(state, Phase.OFFERED, decode)
            self._promise(decode, state, is_batch)
        stager = self._life.cluster.prefill(source)
        address = stager.hello.link if stager else ""
        self._life.send(decode, Offer([state.work() for state in states], is_batch, source, address))

    def _promise(self, decode: InstanceId, state: RequestState, is_batch: bool) -> None:
        if view := self._life.cluster.decode(decode):
            if is_batch and not view.batch:
                view.batch_since_s = self._life.now
            num_blocks = state.num_blocks or -(-state.num_tokens // view.hello.limits.block_size)
            needed = (view.batch if is_batch else view.near)[state.key] = num_blocks + 1
            if not state.is_rt:
                view.be_promised[state.key] = needed

    # ---- on a decode instance ----

    def report(self, sender: InstanceId, report: DecodeReport) -> None:
        life, view = self._life, self._life.cluster.decode(sender)
        if view is None:
            raise RuntimeError(f"{sender} reports as a decode instance, but is none that is up")
        counters = life.counters.of(sender)
        counters.add_report(report)
        view.report, view.num_free_blocks = report, report.num_free_blocks
        self._admitted(view, report.admitted)
        life.add_tokens(sender, report.news)
        view.pace = report.pace
        if isinstance(view, ColocatedView):
            for key, num_computed in report.progress:
                if key in view.pending and (state := life.requests.get(key)):
                    view.pending.put(key, max(state.num_tokens - num_computed, 0), state.is_rt)
        if report.news:
            view.progress_s = life.now
        self._victims(view, report.wants_evicted)
        for key, num_tokens in report.evicted:
            if state := life.find(key, sender, Phase.EVICTING):
                counters.num_evictions += 1
                life.counters.num_evicted_for_rt += view.awaits_rt and not state.is_rt
                state.num_cached = num_tokens
                life.requeue(state)

    def _victims(self, view: DecodeView, keys: Sequence[RequestKey]) -> None:
        life, sender = self._life, view.instance_id
        for key in view.refused.keys() - keys:
            del view.refused[key]
            if state := life.find(key, sender, Phase.MAKING_ROOM):
                life.enter(state, Phase.RUNNING, sender)
                life.send_pool(MakeSpare([key]))
        for key in keys:
            if state := life.find(key, sender, Phase.RUNNING):
                life.counters.of(sender).num_preemptions += 1
                life.enter(state, Phase.MAKING_ROOM, sender)
                self.make_room(state)

    def _admitted(self, view: DecodeView, keys: Sequence[RequestKey]) -> None:
        sender = view.instance_id
        states = [state for key in keys if (state := self._life.find(key, sender, Phase.OFFERED))]
        if not view.is_batch_begun and any(state.key in view.batch for state in states):
            view.is_batch_begun = True
            self._life.counters.of(sender).num_batch_switches += 1
        unstaged: dict[InstanceId, list[RequestKey]] = {}
        for state in states:
            self._life.enter(state, Phase.RUNNING, sender)
            if state.staged_at:
                unstaged.setdefault(state.staged_at, []).append(state.key)
                self._life.unstaged(state)
        for stager, staged_keys in unstaged.items():
            self.unstaged(stager, staged_keys)
        if pooled := [state.key for state in states if state.blocks]:
            self._life.send_pool(MakeSpare(pooled))

    def unstaged(self, stager: InstanceId, keys: list[RequestKey]) -> None:
        if view := self._life.cluster.prefill(stager):
            for key in keys:
                view.staging.pop(key, None)
            self._life.send(stager, Unstage(keys))

    def make_room(self, state: RequestState) -> None:
        pool, memory = self._life.cluster.pool, self._life.pool_demand
        if pool:
            most = pool.hello.limits.num_blocks * pool.hello.limits.block_size
            num_tokens = min(memory.num_tokens_to_evict(state), most)
            self._life.send_pool(Reserve(state.key, num_tokens, state.request.request_id))

    def made_room(self, state: RequestState, reserved: Reserved) -> None:
        """Without room it stays where it is, with its KV, and goes on if it can."""
        if reserved.blocks is None:
            if self._life.unpin_all():
                self.make_room(state)
            elif view := self._life.cluster.decode(state.place):
                view.refused[state.key] = None
            return
        if view := self._life.cluster.decode(state.place):
            view.refused.pop(state.key, None)
        state.blocks = reserved.blocks
        self._life.enter(state, Phase.EVICTING, state.place)
        self._life.send(state.place, Evict(state.key, state.blocks, state.num_cached))

    def _ask_again(self) -> None:
        """For those that found no room."""
        for view in self._life.cluster.decodes:
            victims = [
                state
                for key in view.refused
                if (state := self._life.find(key, view.instance_id, Phase.MAKING_ROOM))
            ]
            view.refused = {state.key: None for state in victims}
            if victims and self._stands_still(view, victims):
                self._give_up(view, victims)
            else:
                for state in victims:
                    self.make_room(state)

    def _stands_still(self, view: DecodeView, victims: Sequence[RequestState]) -> bool:
        iteration_s = view.report.duration_s if view.report else 0.0
        least_s = STANDSTILL_COLOCATED_S if isinstance(view, ColocatedView) else STANDSTILL_S
        patience_s = max(least_s, STANDSTILL_ITERATIONS * iteration_s)
        since_s = max(view.progress_s, max(state.since_s for state in victims))
        return self._life.now - since_s > patience_s

    def _give_up(self, view: DecodeView, victims: Sequence[RequestState]) -> None:
        """The one with least to compute again: all wait for each other, and nobody else has room to give."""
        victim = min(victims, key=lambda state: (state.is_rt, state.num_tokens))
        del view.refused[victim.key]
        view.progress_s = self._life.now
        self._life.counters.num_recomputed += 1
        self._life.recall(victim)


def _has_room_at_once(stager: PrefillView, states: Sequence[RequestState]) -> bool:
    needed = sum(len(state.blocks) for state in states)
    return not stager.staging and needed <= min(stager.num_free_blocks, stager.num_free_staging_blocks)
