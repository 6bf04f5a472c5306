"""Changes an instance from prefill to decode, or back, while it runs: its weights stay, its requests go on elsewhere.

    (none) -> draining -> told -> (none)
       ^         |          |
       '---------'----------'--- the instance is gone, or (draining) the last other one of its role is

*Draining*, it gets nothing new. Prompts that a prefill instance has are computed and saved there; what is staged or
held there for decode instances goes back to the pool. A decode instance's candidates go back to the pool, and its
running requests are evicted to it: where the pool has no room, they run to their end. When nothing of any request is
there, the instance is *told* (`TakeRole`), and says Hello again. To the rest of the router that is the end of one
process and the start of another, under the same name: whatever dies meanwhile, there is nothing to be undone. One that
is started again has the role of its name, and a new router takes instances for what they say that they are.

One instance changes at a time, and at least one of each role stays. `scheduling/proportion.py` says what is wanted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from alignedserve.protocol.messages import DECODE, PREFILL, Request, TakeRole
from alignedserve.router.clock import Clock
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.counters import Counters
from alignedserve.router.eviction import Eviction
from alignedserve.router.instance_views import DecodeView, PrefillView
from alignedserve.router.outbox import Outbox
from alignedserve.router.prefill_queue import PrefillQueue
from alignedserve.router.recaller import Recaller
from alignedserve.router.request_state import Phase, RequestState
from alignedserve.router.request_table import RequestTable
from alignedserve.scheduling.proportion import Decoding, Proportion, Seen
from alignedserve.types import InstanceId

# In these phases a request decodes, or will in a moment: a prompt that an instance computes is there too.
_DECODING = {*Phase} - {Phase.QUEUED, Phase.RESERVING}


@dataclass
class _Change:
    view: PrefillView | DecodeView
    # The role that it takes.
    role: str
    is_told: bool = False

    @property
    def instance_id(self) -> InstanceId:
        return self.view.instance_id


@dataclass(eq=False, slots=True)
class RoleChanges:
    # See RouterConfig.change_roles.
    _is_on: bool
    _clock: Clock
    _cluster: ClusterState
    _requests: RequestTable
    _prefill_queue: PrefillQueue
    _recaller: Recaller
    _eviction: Eviction
    _outbox: Outbox
    _counters: Counters
    _proportion: Proportion = field(default_factory=Proportion)
    _change: _Change | None = None

    @property
    def is_under_way(self) -> bool:
        return self._change is not None

    def submitted(self, request: Request) -> None:
        if self._is_on and request.tier == "rt":
            ttft_s, tbt_s = (math.inf if each is None else each for each in (request.ttft_s, request.tbt_s))
            work_s = self._seconds(len(request.prompt))
            self._proportion.arrivals.add(work_s, ttft_s, tbt_s, self._clock.now)

    def go_on(self, is_tick: bool) -> None:
        """After each event; `is_tick`: time has passed."""
        if not self._is_on or self._cluster.is_colocated:
            return
        if self._change is None and is_tick:
            self._decide()
        if self._change and not self._change.is_told:
            self._drain(self._change, is_tick)

    def closed(self, instance_id: InstanceId) -> None:
        """A process is gone. One that was told has taken its role: it says Hello next, or is dead."""
        if self._change and self._change.instance_id == instance_id:
            self._counters.role_changes[self._change.role] += self._change.is_told
            self._end()

    def _end(self) -> None:
        self._change = None
        self._proportion.changed(self._clock.now)

    # ---- what is wanted ----------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        wanted = self._proportion.wanted(self._seen())
        views = self._cluster.decodes if wanted == PREFILL else self._cluster.prefills
        if not wanted or not views:
            return
        view = min(views, key=_num_there)
        self._change = _Change(view, wanted)
        self._cluster.drain(view, True)
        if isinstance(view, DecodeView):
            view.coming.clear()  # They will be offered to others.

    def _seen(self) -> Seen:
        prefills, queue = self._cluster.prefills, self._prefill_queue
        rt_work_s, be_work_s = (
            self._seconds(queue.num_tokens_of(is_rt) + sum(view.pending.sum(is_rt) for view in prefills))
            for is_rt in (True, False)
        )
        num_decode = len(self._cluster.decodes)
        return Seen(self._clock.now, len(prefills), num_decode, rt_work_s, be_work_s, self._decoding())

    def _seconds(self, num_tokens: int) -> float:
        """What so many tokens of prompts take at one instance; 0 without a cost model: nothing waits then."""
        rate = self._cluster.prompt_tokens_per_s()
        return num_tokens / rate if rate else 0.0

    def _decoding(self) -> Decoding:
        states = [
            state
            for state in self._requests
            if state.phase in _DECODING and not (state.is_finished or state.is_embedding)
        ]
        views = self._cluster.instances
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
        others = self._cluster.prefills if change.role == DECODE else self._cluster.decodes
        if not others:
            self._cluster.drain(change.view, False)
            self._end()
            return
        if is_tick:
            self._take_back(change)
        if not _num_there(change.view) and not any(_is_at(state, change) for state in self._requests):
            change.is_told = True
            if isinstance(change.view, DecodeView):
                # What it was to expect has changed; that would be said after this, to a prefill instance.
                change.view.take_announcement()
            self._outbox.send(change.instance_id, TakeRole(change.role))

    def _take_back(self, change: _Change) -> None:
        """Takes back what need not end there. What a prefill instance still saves is taken back when that is done."""
        name = change.instance_id
        for state in self._requests:
            if state.is_finished or state.saving_at:
                continue
            if state.phase in (Phase.STAGED, Phase.OFFERED):
                if name in (state.instance_id, state.staged_at, state.staged_for):
                    self._recaller.recall(state)
            elif state.phase is Phase.RUNNING and state.instance_id == name:
                self._eviction.begin(state)


def _num_there(view: PrefillView | DecodeView) -> int:
    """How many requests an instance has, about: what is on its way there is not in it."""
    if isinstance(view, DecodeView):
        return len(view.running) + len(view.batch) + len(view.near)
    return len(view.pending) + len(view.staging) + len(view.held)


def _is_at(state: RequestState, change: _Change) -> bool:
    """Whether the instance has anything of the request, or might."""
    at = (state.instance_id, state.staged_at, state.staged_for, state.saving_at, *state.pending_aborts)
    return change.instance_id in at
