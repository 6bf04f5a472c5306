"""The router's core: events in, orders out. No I/O, no threads, no clock.

`Router` composes `RouterState` and the parts that decide; `on` is the table of contents.
"""

from __future__ import annotations

from alignedserve.protocol.messages import (
    Abort,
    AdaptersSet,
    AnyMessage,
    Candidates,
    DecodeReport,
    Failed,
    Gone,
    Hello,
    PrefillReport,
    Reserved,
    ResetPrefixCache,
    SetAdapters,
    Submit,
    Welcome,
)
from alignedserve.router.adapters import Adapters
from alignedserve.router.config import RouterConfig
from alignedserve.router.copies import DirectHandOver, Offers, StagedTransfers
from alignedserve.router.dispatch import DecodeDispatch, PrefillDispatch
from alignedserve.router.events import Closed, Connected, Event, Received, Send, Tick
from alignedserve.router.intake import Submissions
from alignedserve.router.leaving import EndedAnswers, Eviction, Recaller, Requeuer
from alignedserve.router.owner_room import OwnerRoom
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.recovery import CopyRetries, Orphans, PoolRecovery, Recovery
from alignedserve.router.reports import InstanceReports, OutputProcessor
from alignedserve.router.requests import Phase
from alignedserve.router.role_change import RoleChanges
from alignedserve.router.state import RouterState
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.router.views import ColocatedView, DecodeView, PrefillView
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.types import Epoch, InstanceId


class Router:
    def __init__(
        self, config: RouterConfig, epoch: Epoch, scheduling: SchedulingConfig | None = None
    ) -> None:
        if config.link == "auto":
            raise ValueError("link='auto': the router needs the chosen link")
        self.policy = make_policy(scheduling or SchedulingConfig()).router()
        self.state = state = RouterState(config, self.policy)
        self._orphans = orphans = Orphans(state.clock, config.orphan_s)
        self._pool = pool = PoolClient(state)
        transitions = PhaseTransitions(state)
        requeuer = Requeuer(state, transitions, pool)
        self._recaller = recaller = Recaller(state, transitions, requeuer, pool)
        offers = Offers(state, transitions)
        staging = StagedTransfers(state, transitions, recaller, offers)
        self._eviction = eviction = Eviction(state, transitions, requeuer, recaller, pool)
        self._hand_over = hand_over = DirectHandOver(state, transitions, offers, eviction, pool)
        self._prefill = PrefillDispatch(state, transitions, requeuer, offers, pool)
        self._decode = DecodeDispatch(state, staging, offers, pool)
        self._owner_room = OwnerRoom(state, eviction, recaller, self._decode)
        self._ended_answers = ended = EndedAnswers(state, transitions, recaller, pool)
        self._pool_recovery = PoolRecovery(state, requeuer, recaller, eviction, ended, orphans, pool)
        output = OutputProcessor(state, recaller, ended, pool)
        self._reports = InstanceReports(
            state, transitions, requeuer, output, staging, eviction, ended, pool, hand_over
        )
        self._adapters = adapters = Adapters(state, recaller)
        self._submissions = Submissions(state, requeuer, recaller, orphans, adapters)
        welcome = Welcome(epoch, config.silence_s)
        self._recovery = Recovery(
            state, welcome, transitions, recaller, self._pool_recovery, hand_over, adapters
        )
        self._role_changes = RoleChanges(state, recaller, eviction)
        self._failed_copies = CopyRetries(state, self._recovery, eviction)

    def on(self, event: Event, now: float) -> list[Send]:
        self.state.clock.now = now
        match event:
            case Connected():
                self._recovery.connected(event.hello)
            case Closed():
                self._recovery.closed(event.instance_id)
                self._role_changes.closed(event.instance_id)
            case Received():
                self._received(event.sender, event.message)
            case Tick():
                self.state.link_health.tick()
                self._failed_copies.retry()
                self._pool.retry_refused()
                self._adapters.drop_unused()
                self._pool_recovery.release_expired_orphans()
        self._prefill.start()
        self._eviction.retry()
        self._decode.assign()
        if isinstance(event, Tick):
            self._owner_room.make()
        elif isinstance(event, Received) and isinstance(event.message, DecodeReport):
            self._owner_room.make(event.sender)
        self._role_changes.go_on(isinstance(event, Tick))
        return self.state.outbox.take(now)

    def _received(self, sender: InstanceId, message: AnyMessage) -> None:
        match message:
            case Submit():
                self._submissions.submit(sender, message)
                self._role_changes.submitted(message.request)
            case Abort(keys=keys):
                self._submissions.abort(sender, keys)
            case ResetPrefixCache():
                self.state.counters.num_cache_resets += 1
                self._pool.distrust_all()
                self.state.outbox.send(sender, message)
            case SetAdapters():
                self._adapters.wanted(message)
            case AdaptersSet():
                self._adapters.answered(sender, message)
            case Reserved():
                self._reserved(message)
            case Candidates():
                self._decode.candidates(message)
            case PrefillReport() | DecodeReport():
                if any(each.num_changed for each in message.moved):
                    self._pool.distrust_all()
                if isinstance(message, PrefillReport):
                    self._reports.prefill(sender, message)
                else:
                    self._reports.decode(sender, message)
            case Gone(keys=keys):
                for state in filter(None, map(self.state.requests.get, keys)):
                    self._recaller.confirm(state, sender)
            case Failed():
                if not self._hand_over.failed(sender, message):
                    self._failed_copies.add(sender, message)
            case _:
                raise ValueError(f"{sender} sent a {type(message).__name__}, which is not for the router")

    def _reserved(self, reserved: Reserved) -> None:
        for key in reserved.dropped:
            self._pool_recovery.dropped(key)
        state = self.state.requests.get(reserved.key)
        if state is None or reserved.number != state.reserve_number:
            return
        state.reserve_number = 0
        if state.phase is Phase.RESERVING:
            self._prefill.reserved(state, reserved)
        elif state.phase is Phase.MAKING_ROOM:
            self._eviction.reserved(state, reserved)
        elif state.phase is Phase.LEAVING:
            self._ended_answers.reserved(state, reserved)

    def take_remarks(self) -> list[str]:
        """Returns sentences for the log, each once."""
        return self._submissions.take_remarks() + self.state.link_health.take_remarks()

    def puts_off(self, hello: Hello) -> bool:
        """Returns whether an instance has connected before it is known which adapters it needs."""
        return hello.limits.num_adapter_places > 0 and not self._adapters.are_known

    @property
    def changing_roles(self) -> tuple[str, ...]:
        return self._role_changes.roles

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for anything, and no time needs to pass."""
        is_busy = self._role_changes.is_under_way or self._adapters.has_unused
        return not (len(self.state.requests) or len(self._orphans) or is_busy)

    def check_idle(self) -> None:
        """Raises RuntimeError, naming what is left, if anything is left of finished requests."""
        holding = [
            view.instance_id
            for view in self.state.cluster
            if (isinstance(view, PrefillView | ColocatedView) and view.pending)
            or (isinstance(view, PrefillView) and (view.staging or view.held))
            or (isinstance(view, DecodeView) and (view.batch or view.near or view.running))
        ]
        self.state.prefill_queue.check()
        num_queued = len(self.state.prefill_queue) + len(self.state.prefill_queue.reserving)
        num_queued += len(self.state.prefill_queue.prefixes)
        left = (len(self.state.requests), len(self.state.decode_queue), num_queued, len(self._orphans))
        num_owners = len(self.state.prefill_queue.owners | self.state.decode_queue.owners)
        if any(left) or holding or num_owners:
            raise RuntimeError(
                "the router is idle, but {} requests, {} pooled, {} queued, {} orphans and {} owners are left".format(
                    *left, num_owners
                )
                + (f", and some at {', '.join(holding)}" if holding else "")
            )
