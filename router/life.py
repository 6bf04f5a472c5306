"""A request's life: its states, what each change means for counts, pool and client. All parts of the router use it.

    QUEUED -> RESERVING -> PREFILLING -> POOLED -> (STAGED ->) OFFERED -> RUNNING -> over
       ^                                   ^                     MAKING_ROOM <-'
       |                                   |                          v
       '--- some of its KV was lost -------'------------------ EVICTING

Blocks of the pool are released only when no instance can touch them any more: an instance that was told to forget a
request says so (`Gone`), or dies; until then the request is LEAVING.
"""

from __future__ import annotations

from alignedserve.messages import Abort, AnyMessage, Commit, MakeSpare, NewTokens, Release, Tokens
from alignedserve.types import InstanceId, RequestKey
from router.config import RouterConfig
from router.counters import Counters
from router.entry import RUNNING, Entry, State
from router.events import Send
from router.fleet import Fleet
from router.policies.base import BatchPolicy
from router.pooled import Pooled
from router.queue import PrefillQueue


class Life:
    def __init__(self, config: RouterConfig, policy: BatchPolicy) -> None:
        self.config = config
        self.policy = policy
        self.fleet = Fleet()
        self.counters = Counters()
        self.entries: dict[RequestKey, Entry] = {}
        self.queue = PrefillQueue()
        # those whose blocks the pool was asked for, before prefill
        self.reserving: dict[RequestKey, Entry] = {}
        self.pooled = Pooled()
        self.now = 0.0
        self._sends: list[Send] = []
        # what gateways will hear: of each, tokens, and the stories of some of the requests
        self._news: dict[InstanceId, Tokens] = {}

    # ---- sending ----

    def send(self, to: InstanceId | None, message: AnyMessage) -> None:
        """To those that are up; the others have forgotten everything anyway."""
        if to is not None and to in self.fleet:
            self._sends.append(Send(to, message))

    def send_pool(self, message: AnyMessage) -> None:
        if self.fleet.pool:
            self.send(self.fleet.pool.instance_id, message)

    def tell_client(self, entry: Entry, news: NewTokens) -> None:
        self._tokens_for(entry.gateway).news.append(news)

    def tell_story(self, entry: Entry) -> None:
        """How it has gone so far, with whatever else its gateway hears."""
        self._tokens_for(entry.gateway).timelines[entry.key] = list(entry.timeline)

    def _tokens_for(self, gateway: InstanceId) -> Tokens:
        return self._news.setdefault(gateway, Tokens([]))

    def take_sends(self) -> list[Send]:
        for gateway, tokens in self._news.items():
            self.send(gateway, tokens)
        sends, self._sends, self._news = self._sends, [], {}
        return sends

    # ---- states ----

    def enter(self, entry: Entry, state: State, place: InstanceId | None = None) -> None:
        """The one place where states change, and the counts that hang on them."""
        self.reserving.pop(entry.key, None)
        self.pooled.discard(entry)
        self.queue.discard(entry)
        if prefill := self.fleet.prefill(entry.place):
            prefill.pending.pop(entry.key, None)
        for name in (entry.place, entry.staged_for):
            if decode := self.fleet.decode(name):
                decode.forget(entry.key)
        entry.state, entry.place, entry.since_s = state, place, self.now
        entry.mark()
        if state is State.RESERVING:
            self.reserving[entry.key] = entry
        elif state is State.POOLED:
            self.pooled.add(entry)
        elif state is State.PREFILLING and (prefill := self.fleet.prefill(place)):
            prefill.pending[entry.key] = entry.num_missing
        elif state in RUNNING and (decode := self.fleet.decode(place)):
            decode.running[entry.key] = None

    def requeue(self, entry: Entry) -> None:
        """No instance has it: on with what the pool has."""
        if entry.is_pooled:
            self.enter(entry, State.POOLED)
            self.commit(entry, is_candidate=self.policy.uses_index)
        else:
            entry.num_cached = entry.num_reusable
            self.enter(entry, State.QUEUED)
            self.queue.push(entry, self.policy.prefill_due_s(entry))
            self._hold_no_room(entry)
        entry.staged_at = entry.staged_for = None

    def _hold_no_room(self, entry: Entry) -> None:
        """Or those before it in the queue might wait for it for ever."""
        if entry.num_cached:
            self.send_pool(MakeSpare([entry.key]))
        elif entry.blocks:
            entry.blocks = []
            self.release([entry.key])

    def commit(self, entry: Entry, is_candidate: bool) -> None:
        due_s = entry.since_s + self.policy.patience_s(self.fleet, self.pooled)
        self.send_pool(Commit(entry.key, entry.num_cached, due_s, is_candidate))

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
        del self.entries[entry.key]
        self.release([entry.key])

    def release(self, keys: list[RequestKey]) -> None:
        if keys:
            self.queue.pool_is_full = False
            self.send_pool(Release(keys))

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
            if is_first or news.finish_reason:
                self.tell_story(entry)
            self.tell_client(entry, news)
            if news.finish_reason:
                # a prefill instance may still be saving it
                is_forgotten = self.fleet.decode(sender) is not None
                self.end(entry, gone_from=sender if is_forgotten else None)
            else:
                entry.forecast.advance(len(entry.output), self.now)

    def at(self, key: RequestKey, place: InstanceId, *states: State) -> Entry | None:
        """The request, if it is there in one of these states: messages cross."""
        entry = self.entries.get(key)
        return entry if entry and entry.place == place and entry.state in states else None
