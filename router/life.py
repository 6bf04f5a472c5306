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
from alignedserve.router.census import Census
from alignedserve.router.clock import with_first_token
from alignedserve.router.config import RouterConfig
from alignedserve.router.counters import Counters
from alignedserve.router.entry import COMING, RUNNING, Entry, State
from alignedserve.router.events import Send
from alignedserve.router.fleet import ColocatedView, Fleet
from alignedserve.router.memory import Memory
from alignedserve.router.pooled import Pooled
from alignedserve.router.queue import PrefillQueue
from alignedserve.router.tally import Tally
from alignedserve.router.telling import Telling
from alignedserve.scheduling.island import RoutedRequest
from alignedserve.scheduling.policies import Policy
from alignedserve.types import InstanceId, RequestKey

# finish reasons of answers that are whole
ENDS = ("stop", "length")


class Life:
    def __init__(self, config: RouterConfig, policy: Policy) -> None:
        self.config = config
        self.policy = policy.router()
        self.fleet = Fleet()
        self.memory = Memory(self.fleet)
        self.counters = Counters()
        self.entries: dict[RequestKey, Entry] = {}
        self.census = Census()
        self.queue = PrefillQueue(self.policy)
        # best-effort prompts that were begun, and wait with what the pool has of them
        self.held: dict[RequestKey, Entry] = {}
        # tokens to compute of those whose blocks the pool was asked for, before prefill
        self.reserving = Tally()
        self.pooled = Pooled()
        # something was released since victims were last asked room for
        self.may_have_room = False
        self.now = 0.0
        self._sends: list[Send] = []
        self.telling = Telling()

    # ---- for the policy: see `scheduling.island.Island` ----

    @property
    def num_be(self) -> int:
        return self.memory.num_be

    def expected_output(self, request: RoutedRequest) -> int:
        return self.memory.expected_output(self.entries[request.key])

    def has_room_for(self, request: RoutedRequest, be_share: float, share: float) -> bool:
        return self.memory.has_room_for(self.entries[request.key], be_share, share)

    # ---- sending ----

    def send(self, to: InstanceId | None, message: AnyMessage) -> None:
        """To those that are up; the others have forgotten everything anyway."""
        if to is not None and to in self.fleet:
            self._sends.append(Send(to, message))

    def send_pool(self, message: AnyMessage) -> None:
        if self.fleet.pool:
            self.send(self.fleet.pool.instance_id, message)

    def take_sends(self) -> list[Send]:
        for gateway, tokens in self.telling.take(self.now):
            self.send(gateway, tokens)
        for view in self.fleet.decodes:
            if (coming := view.news_of_coming) is not None:
                view.told = coming
                self.send(view.instance_id, coming)
        sends, self._sends = self._sends, []
        return sends

    # ---- states ----

    def enter(self, entry: Entry, state: State, place: InstanceId | None = None) -> None:
        """The one place where states change, and the counts that hang on them."""
        self.reserving.discard(entry.key)
        self.pooled.discard(entry)
        self.queue.discard(entry)
        self.held.pop(entry.key, None)
        if place != entry.place and (computing := self.fleet.computing(entry.place)):
            computing.pending.discard(entry.key)
        for name in (entry.place, entry.staged_for):
            if decode := self.fleet.decode(name):
                decode.forget(entry.key)
        if (expecting := self.fleet.decode(entry.expected_at)) and state not in COMING:
            expecting.coming.pop(entry.key, None)
        entry.state, entry.place, entry.since_s = state, place, self.now
        entry.mark()
        if state is State.QUEUED:
            self.memory.drop(entry)
        else:
            self.memory.claim(entry)
        if state is State.RESERVING:
            self.reserving.put(entry.key, entry.num_missing, entry.is_rt)
        elif state is State.POOLED:
            self.pooled.add(entry)
        elif state is State.PREFILLING and (prefill := self.fleet.prefill(place)):
            prefill.pending.put(entry.key, entry.num_missing, entry.is_rt)
            self._announce(entry)
        elif state in RUNNING and (decode := self.fleet.decode(place)):
            decode.running[entry.key] = None
            if not entry.is_rt:
                decode.be_running[entry.key] = None
        self.census.see(entry)

    def _announce(self, entry: Entry) -> None:
        """A decode instance may be told that it will come."""
        expecting = self.policy.expect_at(entry, self)
        if expecting and (view := self.fleet.decode(expecting.instance_id)):
            entry.expected_at = view.instance_id
            view.coming[entry.key] = bool(entry.output)

    def requeue(self, entry: Entry) -> None:
        """No instance has it: on with what the pool has."""
        if entry.is_pooled:
            self.enter(entry, State.POOLED)
            self.commit(entry, is_candidate=True)
            self.unstaged(entry)
        else:
            self.wait(entry)

    def wait(self, entry: Entry) -> None:
        """For room in the pool, which may have dropped what it has of it by then."""
        entry.num_cached = entry.num_reusable
        self.enter(entry, State.QUEUED)
        self.queue.push(entry, self.policy.urgency(entry, self))
        self._keep_what_it_has(entry)
        self.unstaged(entry)

    def staged(self, entry: Entry, stager: InstanceId, decode: InstanceId) -> None:
        """It has, or will have, a copy in a prefill instance's buffer."""
        entry.staged_at, entry.staged_for = stager, decode
        self.census.see(entry)

    def unstaged(self, entry: Entry) -> None:
        """Safe to repeat."""
        entry.staged_at = entry.staged_for = None
        self.census.see(entry)

    def _keep_what_it_has(self, entry: Entry) -> None:
        """As a spare: those before it in the queue might wait for its room for ever. Only what the policy holds is not
        for others to take; but real time may take it (`give_way`)."""
        if entry.num_cached and self.policy.holds(entry):
            self.held[entry.key] = entry
            self.memory.claim(entry)
            self.commit(entry, is_candidate=False)
        elif entry.num_cached:
            self.send_pool(MakeSpare([entry.key]))
        elif entry.blocks:
            entry.blocks = []
            self.release([entry.key])

    def give_way(self) -> bool:
        """Begun best-effort prompts that wait hold nothing any more. Whether there were any."""
        held, self.held = list(self.held.values()), {}
        if held:
            self.send_pool(MakeSpare([entry.key for entry in held]))
            self.queue.has_room_again()
        for entry in held:
            self.memory.drop(entry)
        return bool(held)

    def commit(self, entry: Entry, is_candidate: bool) -> None:
        self.send_pool(
            Commit(entry.key, entry.num_cached, self.policy.admission_due_s(entry, self), is_candidate)
        )

    def recall(self, entry: Entry, gone_from: InstanceId | None = None) -> None:
        """Takes it from wherever it is; it goes on from the pool. `gone_from` has forgotten it already."""
        holders = {place: None for place in (entry.place, entry.staged_at) if place and place != gone_from}
        entry.holders = [place for place in holders if place in self.fleet]
        if (stager := self.fleet.prefill(entry.staged_at)) and stager.staging.pop(entry.key, None):
            self.counters.of(stager.instance_id).num_spills += not entry.is_over
        if not entry.holders:
            self._left(entry)
            return
        self.enter(entry, State.LEAVING)
        for place in entry.holders:
            self.send(place, Abort(entry.key))

    def end(self, entry: Entry, gone_from: InstanceId | None = None) -> None:
        """Its client has its answer, or is gone."""
        entry.is_over = True
        self.census.see(entry)
        self.telling.forget(entry.key)
        if entry.state is not State.LEAVING:
            self.recall(entry, gone_from)

    def gone(self, entry: Entry, instance_id: InstanceId) -> None:
        """An instance has forgotten it, or is dead."""
        if entry.state is State.LEAVING and instance_id in entry.holders:
            entry.holders.remove(instance_id)
            if not entry.holders:
                self._left(entry)

    def _left(self, entry: Entry) -> None:
        if not entry.is_over:
            self.requeue(entry)
            return
        self.enter(entry, State.LEAVING)
        self.memory.drop(entry)
        del self.entries[entry.key]
        self.release([entry.key])

    def release(self, keys: list[RequestKey]) -> None:
        if keys:
            self.has_room_again()
            self.send_pool(Release(keys))

    def has_room_again(self) -> None:
        """Or may have: what the pool refused may be asked for once more."""
        self.may_have_room = True
        self.queue.has_room_again()

    # ---- tokens ----

    def news(self, sender: InstanceId, all_news: list[NewTokens]) -> None:
        """Tokens that an instance reports of requests that are with it."""
        for news in all_news:
            entry = self.entries.get(news.key)
            if entry is None or entry.place != sender or entry.is_over:
                continue
            if news.first != len(entry.output):
                raise RuntimeError(
                    f"{sender}: request {news.key} has {len(entry.output)} tokens, and {news.first} before the new ones"
                )
            is_first = not entry.output
            entry.output.extend(news.tokens)
            if is_first:
                entry.deadlines = with_first_token(entry.deadlines, self.now)
                if (view := self.fleet.decode(entry.expected_at)) and entry.key in view.coming:
                    view.coming[entry.key] = True
                if isinstance(view := self.fleet.decode(sender), ColocatedView):
                    view.pending.discard(entry.key)
            if is_first or news.finish_reason:
                self.telling.tell_story(entry)
            self.telling.tell(entry, news, self.now)
            if news.finish_reason:
                if news.finish_reason in ENDS:
                    self.memory.ended(entry)
                # a prefill instance may still be saving it
                is_forgotten = self.fleet.decode(sender) is not None
                self.end(entry, gone_from=sender if is_forgotten else None)
            else:
                entry.forecast.advance(len(entry.output), self.now)
                if self.memory.is_outgrown(entry):
                    self.memory.claim(entry)

    def at(self, key: RequestKey, place: InstanceId, *states: State) -> Entry | None:
        """The request, if it is there in one of these states: messages cross."""
        entry = self.entries.get(key)
        return entry if entry and entry.place == place and entry.state in states else None
