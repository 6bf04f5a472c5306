"""Changes a running instance from prefill to decode, or back. Its weights stay, and its requests continue elsewhere.

    (none) -> draining -> told -> (none)
       ^         |          |
       '---------'----------'--- the instance is gone, or (draining) the last other one of its role is

A *draining* instance gets nothing new. A prefill instance computes and saves the prompts that it has. KV that is staged
or held there for decode instances goes back to the pool. A decode instance's candidates go back to the pool, and its
running requests are evicted to it. If the pool has no room, they run to their end.

When nothing of any request is left there, the instance is *told* (`TakeRole`) and sends Hello again. To the rest of the
router, one process ends and another starts under the same name. So nothing has to be undone, whichever process dies
meanwhile. A restarted instance has the role of its name. A new router accepts the role that each instance reports.

Only one instance changes at a time, and at least one of each role stays. `scheduling/proportion.py` decides which role
is wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from alignedserve.protocol.messages import DECODE, PREFILL, ROLES_THAT_CHANGE, Request, TakeRole
from alignedserve.router.leaving import Eviction, Recaller
from alignedserve.router.requests import Phase, RequestState
from alignedserve.router.state import RouterState
from alignedserve.router.views import DecodeView, PrefillView
from alignedserve.scheduling.proportion import Decoding, Proportion, Seen
from alignedserve.types import InstanceId

# Phases in which a request decodes, or will soon. A prompt that an instance computes is included.
_DECODING = {*Phase} - {Phase.QUEUED, Phase.RESERVING}


@dataclass
class _Change:
    view: PrefillView | DecodeView
    # The new role.
    role: str
    is_told: bool = False

    @property
    def instance_id(self) -> InstanceId:
        return self.view.instance_id


@dataclass(eq=False, slots=True)
class RoleChanges:
    _router: RouterState
    # See RouterConfig.change_roles.
    _recaller: Recaller
    _eviction: Eviction
    _proportion: Proportion = field(default_factory=Proportion)
    _change: _Change | None = None

    @property
    def is_under_way(self) -> bool:
        return self._change is not None

    @property
    def roles(self) -> tuple[str, ...]:
        """The roles between which instances may change."""
        return ROLES_THAT_CHANGE if self._router.config.change_roles else ()

    def submitted(self, request: Request) -> None:
        if self._router.config.change_roles and request.tier == "rt":
            ttft_s, tbt_s = (math.inf if each is None else each for each in (request.ttft_s, request.tbt_s))
            work_s = self._seconds(len(request.prompt))
            self._proportion.arrivals.add(work_s, ttft_s, tbt_s, self._router.clock.now)

    def go_on(self, is_tick: bool) -> None:
        """Continues or decides a change. Called after each event. `is_tick`: time has passed."""
        if not self._router.config.change_roles or self._router.cluster.is_colocated:
            return
        if self._change is None and is_tick:
            self._decide()
        if self._change and not self._change.is_told:
            self._drain(self._change, is_tick)

    def closed(self, instance_id: InstanceId) -> None:
        """Ends the change of a process that is gone. If it was told to change, it has taken its role and sends Hello
        next, or it is dead."""
        if self._change and self._change.instance_id == instance_id:
            self._router.counters.role_changes[self._change.role] += self._change.is_told
            self._end()

    def _end(self) -> None:
        self._change = None
        self._proportion.changed(self._router.clock.now)

    # ---- what is wanted ----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        wanted = self._proportion.wanted(self._seen())
        views = self._router.cluster.decodes if wanted == PREFILL else self._router.cluster.prefills
        if not wanted or not views:
            return
        view = min(views, key=_num_there)
        self._change = _Change(view, wanted)
        self._router.cluster.drain(view, True)
        if isinstance(view, DecodeView):
            view.coming.clear()  # They will be offered to other instances.

    def _seen(self) -> Seen:
        prefills, queue = self._router.cluster.prefills, self._router.prefill_queue
        rt_work_s, be_work_s = (
            self._seconds(queue.num_tokens_of(is_rt) + sum(view.pending.sum(is_rt) for view in prefills))
            for is_rt in (True, False)
        )
        num_decode = len(self._router.cluster.decodes)
        return Seen(self._router.clock.now, len(prefills), num_decode, rt_work_s, be_work_s, self._decoding())

    def _seconds(self, num_tokens: int) -> float:
        """Returns the seconds that this many prompt tokens take at one instance; 0 without a cost model, so nothing
        counts as waiting."""
        rate = self._router.cluster.prompt_tokens_per_s()
        return num_tokens / rate if rate else 0.0

    def _decoding(self) -> Decoding:
        states = [
            state
            for state in self._router.requests
            if state.phase in _DECODING and not (state.is_finished or state.is_embedding)
        ]
        views = self._router.cluster.instances
        limits = [view.hello.limits for view in views]
        num_tokens = sum(state.num_tokens for state in states)
        length = num_tokens // max(len(states), 1)
        return Decoding(
            num_requests=len(states),
            num_tokens=num_tokens,
            max_tokens=min((each.num_tokens_of(length) for each in limits), default=1),
            max_requests=min((each.max_num_seqs for each in limits), default=1),
            cost=next((view.hello.cost for view in views if view.hello.cost), None),
            tbt_s=self._proportion.arrivals.tbt_s,
        )

    # ---- draining ----------------------------------------------------------------------------------------------------

    def _drain(self, change: _Change, is_tick: bool) -> None:
        others = self._router.cluster.prefills if change.role == DECODE else self._router.cluster.decodes
        if not others:
            self._router.cluster.drain(change.view, False)
            self._end()
            return
        if is_tick:
            self._take_back(change)
        if not _num_there(change.view) and not any(_is_at(state, change) for state in self._router.requests):
            change.is_told = True
            if isinstance(change.view, DecodeView):
                # Its expected real time has changed. The announcement would be sent after this, to a prefill instance.
                change.view.take_announcement()
            self._router.outbox.send(change.instance_id, TakeRole(change.role))

    def _take_back(self, change: _Change) -> None:
        """Takes back the requests that need not end there. A prompt that is still being saved is taken back after
        that."""
        for state in self._router.requests:
            if state.is_finished or state.saving_at or not _is_at(state, change):
                continue
            if state.phase in (Phase.STAGED, Phase.OFFERED):
                self._recaller.recall(state)
            elif state.phase is Phase.RUNNING:
                self._eviction.begin(state)


def _num_there(view: PrefillView | DecodeView) -> int:
    """Returns the approximate number of requests at an instance. Requests on their way there do not count."""
    if isinstance(view, DecodeView):
        return len(view.running) + len(view.batch) + len(view.near)
    return len(view.pending) + len(view.staging) + len(view.held)


def _is_at(state: RequestState, change: _Change) -> bool:
    """Returns whether the instance has, or may have, anything of the request."""
    staged = (state.staged.at, state.staged.decode) if state.staged else ()
    pending_aborts = state.leaving.pending_aborts if state.leaving else ()
    return change.instance_id in (state.instance_id, state.saving_at, *staged, *pending_aborts)
