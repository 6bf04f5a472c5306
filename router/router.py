"""The router's core: events in, orders out. No I/O, no threads, no clock.

`Router` composes the owners of state and the parts that decide; `on` is the table of contents. Each kind of state has
one owner, and each part is given the owners that it needs:

    which requests exist             RequestTable, their phases: PhaseTransitions, counted in RequestCounts
    which processes are up           ClusterState
    requests that wait               PrefillQueue, DecodeQueue
    what the pool will have to hold  PoolDemand
    what is to be sent               Outbox, OutputCoalescing
    which links work                 LinkHealth
    which instance changes its role  RoleChanges
    what happened                    Counters
"""

from __future__ import annotations

from alignedserve.protocol.messages import (
    Abort,
    AnyMessage,
    Candidates,
    DecodeReport,
    Failed,
    Gone,
    PrefillReport,
    Reserved,
    Submit,
    Welcome,
)
from alignedserve.router.clock import Clock
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.config import RouterConfig
from alignedserve.router.counters import Counters
from alignedserve.router.decode import DecodeDispatch
from alignedserve.router.decode_queue import DecodeQueue
from alignedserve.router.events import Closed, Connected, Event, Received, Send, Tick
from alignedserve.router.eviction import Eviction
from alignedserve.router.failed_copies import FailedCopies
from alignedserve.router.hand_over import HandOver
from alignedserve.router.instance_views import ColocatedView, DecodeView, PrefillView
from alignedserve.router.island_view import IslandView
from alignedserve.router.link_health import LinkHealth
from alignedserve.router.offers import Offers
from alignedserve.router.orphans import Orphans
from alignedserve.router.outbox import Outbox
from alignedserve.router.output_coalescing import OutputCoalescing
from alignedserve.router.output_processor import OutputProcessor
from alignedserve.router.pool_client import PoolClient
from alignedserve.router.pool_demand import PoolDemand
from alignedserve.router.pool_recovery import PoolRecovery
from alignedserve.router.prefill import PrefillDispatch
from alignedserve.router.prefill_queue import PrefillQueue
from alignedserve.router.recaller import Recaller
from alignedserve.router.recovery import Recovery
from alignedserve.router.reports import InstanceReports
from alignedserve.router.request_counts import RequestCounts
from alignedserve.router.request_state import Phase
from alignedserve.router.request_table import RequestTable
from alignedserve.router.requeuer import Requeuer
from alignedserve.router.role_change import RoleChanges
from alignedserve.router.staging import Staging
from alignedserve.router.submissions import Submissions
from alignedserve.router.transitions import PhaseTransitions
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies import make_policy
from alignedserve.types import Epoch, InstanceId


class Router:
    def __init__(
        self, config: RouterConfig, epoch: Epoch, scheduling: SchedulingConfig | None = None
    ) -> None:
        if config.link == "auto":
            raise ValueError("link='auto': the router needs the chosen link")
        self.config = config
        self.policy = make_policy(scheduling or SchedulingConfig()).router()
        self.clock = Clock()
        self.cluster = ClusterState()
        self.link_health = LinkHealth(self.clock)
        self.requests = RequestTable()
        self.counts = RequestCounts()
        self.counters = Counters()
        self.prefill_queue = PrefillQueue(self.policy)
        self.decode_queue = DecodeQueue()
        self.demand = PoolDemand(self.cluster)
        self.island = IslandView(
            self.clock, self.cluster, self.requests, self.prefill_queue, self.decode_queue, self.demand
        )
        self._orphans = Orphans(self.clock, config.orphan_s)
        self._output = OutputCoalescing()
        self._outbox = Outbox(self.cluster, self._output)
        self._compose(epoch)

    def _compose(self, epoch: Epoch) -> None:
        """Gives each part the owners that it needs, and the parts that it uses."""
        config, policy, island, clock = self.config, self.policy, self.island, self.clock
        cluster, requests, counters, demand = self.cluster, self.requests, self.counters, self.demand
        prefill_queue, decode_queue, orphans = self.prefill_queue, self.decode_queue, self._orphans
        outbox, output, link_health = self._outbox, self._output, self.link_health
        pool = PoolClient(cluster, prefill_queue, outbox, policy, island)
        transitions = PhaseTransitions(
            clock, cluster, self.counts, prefill_queue, decode_queue, demand, policy, island
        )
        requeuer = Requeuer(transitions, prefill_queue, demand, pool, policy, island)
        recaller = Recaller(cluster, requests, transitions, requeuer, demand, pool, outbox, output, counters)
        offers = Offers(clock, cluster, transitions, outbox)
        staging = Staging(config.link, cluster, requests, transitions, recaller, outbox, offers, link_health)
        eviction = Eviction(
            clock, cluster, requests, transitions, requeuer, recaller, demand, pool, outbox, counters
        )
        self._hand_over = hand_over = HandOver(
            config.link,
            cluster,
            requests,
            transitions,
            outbox,
            offers,
            eviction,
            pool,
            link_health,
            policy,
            island,
        )
        output_processor = OutputProcessor(clock, cluster, requests, demand, output, recaller)
        pool_recovery = PoolRecovery(
            cluster, requests, prefill_queue, requeuer, recaller, eviction, orphans, pool, outbox, counters
        )
        self._prefill = PrefillDispatch(
            cluster, requests, prefill_queue, transitions, requeuer, offers, pool, outbox, policy, island
        )
        self._decode = DecodeDispatch(cluster, decode_queue, staging, offers, pool, counters, policy, island)
        self._reports = InstanceReports(
            clock,
            cluster,
            requests,
            transitions,
            requeuer,
            output_processor,
            output,
            staging,
            eviction,
            pool,
            counters,
            link_health,
            hand_over,
        )
        self._submissions = Submissions(
            config, clock, cluster, requests, prefill_queue, requeuer, recaller, orphans, output, outbox
        )
        welcome = Welcome(epoch, config.silence_s)
        self._recovery = Recovery(
            welcome,
            cluster,
            requests,
            decode_queue,
            transitions,
            recaller,
            pool_recovery,
            outbox,
            counters,
            link_health,
            hand_over,
        )
        self._role_changes = RoleChanges(
            config.change_roles,
            clock,
            cluster,
            requests,
            prefill_queue,
            recaller,
            eviction,
            outbox,
            counters,
        )
        self._failed_copies = FailedCopies(requests, self._recovery, eviction)
        self._pool, self._recaller, self._eviction = pool, recaller, eviction
        self._pool_recovery = pool_recovery

    def on(self, event: Event, now: float) -> list[Send]:
        self.clock.now = now
        match event:
            case Connected():
                self._recovery.connected(event.hello)
            case Closed():
                self._recovery.closed(event.instance_id)
                self._role_changes.closed(event.instance_id)
            case Received():
                self._received(event.sender, event.message)
            case Tick():
                self.link_health.tick()
                self._failed_copies.retry()
                self._pool.retry_refused()
                self._pool_recovery.release_expired_orphans()
        self._prefill.start()
        self._eviction.retry()
        self._decode.assign()
        self._role_changes.go_on(isinstance(event, Tick))
        return self._outbox.take(now)

    def _received(self, sender: InstanceId, message: AnyMessage) -> None:
        match message:
            case Submit():
                self._submissions.submit(sender, message)
                self._role_changes.submitted(message.request)
            case Abort(key=key):
                self._submissions.abort(sender, key)
            case Reserved():
                self._reserved(message)
            case Candidates():
                self._decode.candidates(message)
            case PrefillReport():
                self._reports.prefill(sender, message)
            case DecodeReport():
                self._reports.decode(sender, message)
            case Gone(keys=keys):
                for state in filter(None, map(self.requests.get, keys)):
                    self._recaller.confirm(state, sender)
            case Failed():
                if not self._hand_over.failed(sender, message):
                    self._failed_copies.add(sender, message)
            case _:
                raise ValueError(f"{sender} sent a {type(message).__name__}, which is not for the router")

    def _reserved(self, reserved: Reserved) -> None:
        for key in reserved.dropped:
            self._pool_recovery.dropped(key)
        state = self.requests.get(reserved.key)
        if state is None or reserved.number != state.reserve_number:
            return
        if state.phase is Phase.RESERVING:
            self._prefill.reserved(state, reserved)
        elif state.phase is Phase.MAKING_ROOM:
            self._eviction.reserved(state, reserved)

    def take_remarks(self) -> list[str]:
        """Returns sentences for the log, each once."""
        return self._submissions.take_remarks() + self.link_health.take_remarks()

    @property
    def is_idle(self) -> bool:
        """Whether no request waits for anything, and no time needs to pass."""
        return not (len(self.requests) or len(self._orphans) or self._role_changes.is_under_way)

    def check_idle(self) -> None:
        """Raises RuntimeError, naming what is left, if anything is left of finished requests."""
        holding = [
            view.instance_id
            for view in self.cluster
            if (isinstance(view, PrefillView | ColocatedView) and view.pending)
            or (isinstance(view, PrefillView) and (view.staging or view.held))
            or (isinstance(view, DecodeView) and (view.batch or view.near or view.running))
        ]
        num_queued = len(self.prefill_queue) + len(self.prefill_queue.reserving)
        left = (len(self.requests), len(self.decode_queue), num_queued, len(self._orphans))
        if any(left) or holding:
            raise RuntimeError(
                "the router is idle, but {} requests, {} pooled, {} queued and {} orphans are left".format(
                    *left
                )
                + (f", and some at {', '.join(holding)}" if holding else "")
            )
