"""The only place where a request's phase changes, with all counts and queues that depend on it."""

from __future__ import annotations

from dataclasses import dataclass

from alignedserve.router.requests import RUNNING_PHASES, Leaving, Phase, RequestState, Staged
from alignedserve.router.state import RouterState
from alignedserve.types import InstanceId

# Phases in which a real-time request is on its way to a decode instance, which is told to expect it.
_COMING_PHASES = {Phase.PREFILLING, Phase.POOLED, Phase.STAGED}

# Phases in which a request has started, and its prompt's KV is not in the pool yet.
_BRINGING_PHASES = {Phase.RESERVING, Phase.PREFILLING}

# Phases in which a request waits for its prompt to be sent to an instance.
_WAITING_PHASES = {Phase.QUEUED, Phase.RESERVING}

# Phases that a request may enter with a copy of its KV at a prefill instance.
_COPIED_PHASES = {Phase.OFFERED, Phase.RUNNING, Phase.LEAVING}


@dataclass(eq=False, slots=True)
class PhaseTransitions:
    _router: RouterState

    def enter(self, state: RequestState, phase: Phase, instance_id: InstanceId | None = None) -> None:
        """Moves the request to another phase. `instance_id`: the instance that has it from now on."""
        self._leave(state, phase, instance_id)
        state.phase, state.instance_id, state.since_s = phase, instance_id, self._router.clock.now
        state.leaving = None
        if phase not in _COPIED_PHASES:
            state.staged = state.saving_at = None
        if phase not in _WAITING_PHASES:
            state.num_counted = 0
        state.record_phase()
        if phase is Phase.QUEUED:
            self._router.demand.discard(state)
        else:
            self._router.demand.add(state)
        self._join(state)
        self._end_prefix(state)
        self._router.counts.update(state)

    def _leave(self, state: RequestState, phase: Phase, instance_id: InstanceId | None) -> None:
        self._router.prefill_queue.discard(state)
        self._router.decode_queue.discard(state)
        if instance_id != state.instance_id and (
            computing := self._router.cluster.computing(state.instance_id)
        ):
            computing.pending.discard(state.key)
        for each in (state.instance_id, state.staged.decode if state.staged else None):
            if decode := self._router.cluster.decode(each):
                decode.discard(state.key)
        if (expecting := self._router.cluster.decode(state.expected_at)) and phase not in _COMING_PHASES:
            expecting.coming.pop(state.key, None)

    def _join(self, state: RequestState) -> None:
        if state.phase is Phase.RESERVING:
            self._router.prefill_queue.reserve(state)
        elif state.phase is Phase.POOLED:
            self._router.decode_queue.add(state)
        elif state.phase is Phase.PREFILLING and (prefill := self._router.cluster.prefill(state.instance_id)):
            prefill.pending.put(state.key, state.num_missing, state.is_rt, state.owner)
            self._announce(state)
        elif state.phase in RUNNING_PHASES and (decode := self._router.cluster.decode(state.instance_id)):
            decode.add_running(state)

    def _announce(self, state: RequestState) -> None:
        """Lets a decode instance expect the request while its prompt is computed, if the policy names one."""
        if state.is_embedding:
            return
        expecting = self._router.policy.expect_at(state, self._router.island)
        if expecting and (view := self._router.cluster.decode(expecting.instance_id)):
            state.expected_at = view.instance_id
            view.coming[state.key] = bool(state.output)

    def stage(self, state: RequestState, staged: Staged) -> None:
        """Records that a prefill instance stages the request's KV for a decode instance."""
        self.enter(state, Phase.STAGED, staged.at)
        state.staged = staged

    def hand_over(self, state: RequestState, stager: InstanceId, decode: InstanceId) -> None:
        """Records that a prefill instance holds the computed KV for a decode instance, and saves it at the same
        time."""
        state.staged, state.saving_at = Staged(stager, decode), stager

    def unstage(self, state: RequestState) -> None:
        """Records that the request has no staged copy any more. Safe to repeat."""
        state.staged = None
        self._router.counts.update(state)

    def end_saving(self, state: RequestState) -> None:
        """Records that no prefill instance saves the request's KV beside a decode instance any more. Safe to repeat."""
        state.saving_at = None
        self._end_prefix(state)

    def _end_prefix(self, state: RequestState) -> None:
        """Lets no request wait for this one's prefix any more, unless it is still computed or saved."""
        is_saved = state.saving_at and state.phase is not Phase.LEAVING
        if not is_saved and state.phase not in _BRINGING_PHASES:
            self._router.prefill_queue.prefix_ended(state)

    def leave(self, state: RequestState, leaving: Leaving) -> None:
        """Lets the request leave the instances that have it."""
        self.enter(state, Phase.LEAVING)
        state.leaving = leaving

    def finish(self, state: RequestState) -> None:
        """Marks a request as finished: its client has its answer, or is gone. Its phase stays until it is recalled."""
        if not state.is_finished:
            self._router.prefill_queue.ended(state)
        state.is_finished = True
        self._router.counts.update(state)
