"""A request's life: its states, what each change means for counts, pool and client. All parts of the router use it.

    QUEUED -> RESERVING -> PREFILLING -> POOLED -> (STAGED ->) OFFERED -> RUNNING -> over
       ^                                   ^                     MAKING_ROOM <-'
       |                                   |                          v
       '--- some of its KV was lost -------'------------------ EVICTING

Blocks of the pool are released only when no instance can touch them any more: an instance that was told to forget a
request says so (`Gone`), or dies; until then the request is LEAVING.
"""

from __future__ import annotations

from alignedserve.protocol.messages import Abort, AnyMessage, Commit, MakeSpare, NewTokens, Release
from alignedserve.router.census import RequestCounts
from alignedserve.router.clock import with_first_token
from alignedserve.router.cluster_state import ClusterState, ColocatedView
from alignedserve.router.config import RouterConfig
from alignedserve.router.counters import Counters
from alignedserve.router.decode_queue import DecodeQueue
from alignedserve.router.events import Send
from alignedserve.router.output_coalescing import OutputCoalescing
from alignedserve.router.pool_demand import PoolDemand
from alignedserve.router.prefill_queue import PrefillQueue
from alignedserve.router.request_state import COMING_PHASES, RUNNING_PHASES, Phase, RequestState
from alignedserve.router.token_counts import TokenCounts
from alignedserve.scheduling.island import RoutedRequest
from alignedserve.scheduling.policies import Policy
from alignedserve.types import InstanceId, RequestKey

# finish reasons of answers that are whole
ENDS = ("stop", "length")


class Life:
    def __init__(self, config: RouterConfig, policy: Policy) -> None:
        self.config = config
        self.policy = policy.router()
        self.cluster = ClusterState()
        self.pool_demand = PoolDemand(self.cluster)
        self.counters = Counters()
        self.requests: dict[RequestKey, RequestState] = {}
        self.counts = RequestCounts()
        self.prefill_queue = PrefillQueue(self.policy)
        # best-effort prompts that were begun, and wait with what the pool has of them
        self.pinned: dict[RequestKey, RequestState] = {}
        # tokens to compute of those whose blocks the pool was asked for, before prefill
        self.reserving = TokenCounts()
        self.decode_queue = DecodeQueue()
        # something was released since victims were last asked room for
        self.may_have_room = False
        self.now = 0.0
        self._sends: list[Send] = []
        self.output = OutputCoalescing()

    # ---- for the policy: see `scheduling.island.Island` ----

    @property
    def num_be(self) -> int:
        return self.pool_demand.num_be

    def expected_output(self, request: RoutedRequest) -> int:
        return self.pool_demand.expected_output(self.requests[request.key])

    def has_room_for(self, request: RoutedRequest, be_share: float, share: float) -> bool:
        return self.pool_demand.has_room_for(self.requests[request.key], be_share, share)

    # ---- sending ----

    def send(self, to: InstanceId | None, message: AnyMessage) -> None:
        """To those that are up; the others have forgotten everything anyway."""
        if to is not None and to in self.cluster:
            self._sends.append(Send(to, message))

    def send_pool(self, message: AnyMessage) -> None:
        if self.cluster.pool:
            self.send(self.cluster.pool.instance_id, message)

    def take_sends(self) -> list[Send]:
        for gateway, tokens in self.output.take(self.now):
            self.send(gateway, tokens)
        for view in self.cluster.decodes:
            if (coming := view.pending_coming) is not None:
                view.told = coming
                self.send(view.instance_id, coming)
        sends, self._sends = self._sends, []
        return sends

    # ---- states ----

    def enter(self, state: RequestState, phase: Phase, place: InstanceId | None = None) -> None:
        """The one place where states change, and the counts that hang on them."""
        self.reserving.discard(state.key)
        self.decode_queue.discard(state)
        self.prefill_queue.discard(state)
        self.pinned.pop(state.key, None)
        if place != state.place and (computing := self.cluster.computing(state.place)):
            computing.pending.discard(state.key)
        for name in (state.place, state.staged_for):
            if decode := self.cluster.decode(name):
                decode.forget(state.key)
        if (expecting := self.cluster.decode(state.expected_at)) and phase not in COMING_PHASES:
            expecting.coming.pop(state.key, None)
        state.phase, state.place, state.since_s = phase, place, self.now
        state.record_phase()
        if phase is Phase.QUEUED:
            self.pool_demand.discard(state)
        else:
            self.pool_demand.add(state)
        if phase is Phase.RESERVING:
            self.reserving.put(state.key, state.num_missing, state.is_rt)
        elif phase is Phase.POOLED:
            self.decode_queue.add(state)
        elif phase is Phase.PREFILLING and (prefill := self.cluster.prefill(place)):
            prefill.pending.put(state.key, state.num_missing, state.is_rt)
            self._announce(state)
        elif phase in RUNNING_PHASES and (decode := self.cluster.decode(place)):
            decode.running[state.key] = None
            if not state.is_rt:
                decode.be_running[state.key] = None
        self.counts.update(state)

    def _announce(self, state: RequestState) -> None:
        """A decode instance may be told that it will come."""
        expecting = self.policy.expect_at(state, self)
        if expecting and (view := self.cluster.decode(expecting.instance_id)):
            state.expected_at = view.instance_id
            view.coming[state.key] = bool(state.output)

    def requeue(self, state: RequestState) -> None:
        """No instance has it: on with what the pool has."""
        if state.is_pooled:
            self.enter(state, Phase.POOLED)
            self.commit(state, is_candidate=True)
            self.unstaged(state)
        else:
            self.wait(state)

    def wait(self, state: RequestState) -> None:
        """For room in the pool, which may have dropped what it has of it by then."""
        state.num_cached = state.num_reusable
        self.enter(state, Phase.QUEUED)
        self.prefill_queue.push(state, self.policy.urgency(state, self))
        self._keep_what_it_has(state)
        self.unstaged(state)

    def staged(self, state: RequestState, stager: InstanceId, decode: InstanceId) -> None:
        """It has, or will have, a copy in a prefill instance's buffer."""
        state.staged_at, state.staged_for = stager, decode
        self.counts.update(state)

    def unstaged(self, state: RequestState) -> None:
        """Safe to repeat."""
        state.staged_at = state.staged_for = None
        self.counts.update(state)

    def _keep_what_it_has(self, state: RequestState) -> None:
        """As a spare: those before it in the queue might wait for its room for ever. Only what the policy holds is not
        for others to take; but real time may take it (`unpin_all`)."""
        if state.num_cached and self.policy.pins(state):
            self.pinned[state.key] = state
            self.pool_demand.add(state)
            self.commit(state, is_candidate=False)
        elif state.num_cached:
            self.send_pool(MakeSpare([state.key]))
        elif state.blocks:
            state.blocks = []
            self.release([state.key])

    def unpin_all(self) -> bool:
        """Begun best-effort prompts that wait hold nothing any more. Whether there were any."""
        delayed, self.pinned = list(self.pinned.values()), {}
        if delayed:
            self.send_pool(MakeSpare([state.key for state in delayed]))
            self.prefill_queue.has_room_again()
        for state in delayed:
            self.pool_demand.discard(state)
        return bool(delayed)

    def commit(self, state: RequestState, is_candidate: bool) -> None:
        self.send_pool(
            Commit(state.key, state.num_cached, self.policy.admission_due_s(state, self), is_candidate)
        )

    def recall(self, state: RequestState, gone_from: InstanceId | None = None) -> None:
        """Takes it from wherever it is; it goes on from the pool. `gone_from` has forgotten it already."""
        holders = {place: None for place in (state.place, state.staged_at) if place and place != gone_from}
        state.pending_aborts = [place for place in holders if place in self.cluster]
        if (stager := self.cluster.prefill(state.staged_at)) and stager.staging.pop(state.key, None):
            self.counters.of(stager.instance_id).num_spills += not state.is_finished
        if not state.pending_aborts:
            self._left(state)
            return
        self.enter(state, Phase.LEAVING)
        for place in state.pending_aborts:
            self.send(place, Abort(state.key))

    def end(self, state: RequestState, gone_from: InstanceId | None = None) -> None:
        """Its client has its answer, or is gone."""
        state.is_finished = True
        self.counts.update(state)
        self.output.discard(state.key)
        if state.phase is not Phase.LEAVING:
            self.recall(state, gone_from)

    def forgotten_by(self, state: RequestState, instance_id: InstanceId) -> None:
        """An instance has forgotten it, or is dead."""
        if state.phase is Phase.LEAVING and instance_id in state.pending_aborts:
            state.pending_aborts.remove(instance_id)
            if not state.pending_aborts:
                self._left(state)

    def _left(self, state: RequestState) -> None:
        if not state.is_finished:
            self.requeue(state)
            return
        self.enter(state, Phase.LEAVING)
        self.pool_demand.discard(state)
        del self.requests[state.key]
        self.release([state.key])

    def release(self, keys: list[RequestKey]) -> None:
        if keys:
            self.has_room_again()
            self.send_pool(Release(keys))

    def has_room_again(self) -> None:
        """Or may have: what the pool refused may be asked for once more."""
        self.may_have_room = True
        self.prefill_queue.has_room_again()

    # ---- tokens ----

    def add_tokens(self, sender: InstanceId, all_news: list[NewTokens]) -> None:
        """Tokens that an instance reports of requests that are with it."""
        for news in all_news:
            state = self.requests.get(news.key)
            if state is None or state.place != sender or state.is_finished:
                continue
            if news.first != len(state.output):
                raise RuntimeError(
                    f"{sender}: request {news.key} has {len(state.output)} tokens, and {news.first} before the new ones"
                )
            is_first = not state.output
            state.output.extend(news.tokens)
            if is_first:
                state.deadlines = with_first_token(state.deadlines, self.now)
                if (view := self.cluster.decode(state.expected_at)) and state.key in view.coming:
                    view.coming[state.key] = True
                if isinstance(view := self.cluster.decode(sender), ColocatedView):
                    view.pending.discard(state.key)
            if is_first or news.finish_reason:
                self.output.add_timeline(state)
            self.output.add(state, news, self.now)
            if news.finish_reason:
                if news.finish_reason in ENDS:
                    self.pool_demand.learn_output_len(state)
                # a prefill instance may still be saving it
                is_forgotten = self.cluster.decode(sender) is not None
                self.end(state, gone_from=sender if is_forgotten else None)
            else:
                state.forecast.advance(len(state.output), self.now)
                if self.pool_demand.is_exceeded(state):
                    self.pool_demand.add(state)

    def find(self, key: RequestKey, place: InstanceId, *phases: Phase) -> RequestState | None:
        """The request, if it is there in one of these states: messages cross."""
        state = self.requests.get(key)
        return state if state and state.place == place and state.phase in phases else None
