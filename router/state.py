"""What the router's parts share: the owners of its state, and a policy's view of them. Pure."""

from __future__ import annotations

from collections.abc import Collection

from alignedserve.router.clock import EventClock
from alignedserve.router.cluster import ClusterState
from alignedserve.router.config import RouterConfig
from alignedserve.router.counters import Counters
from alignedserve.router.link_health import LinkHealth
from alignedserve.router.outbox import Outbox, OutputCoalescing
from alignedserve.router.owners import OwnerTurns
from alignedserve.router.pool_demand import PoolDemand
from alignedserve.router.queues import DecodeQueue, PrefillQueue
from alignedserve.router.requests import RequestCounts, RequestTable
from alignedserve.router.views import TokenCounts
from alignedserve.scheduling.island import RoutedRequest
from alignedserve.scheduling.policy import RouterPart


class RouterState:
    """Each kind of state has one owner."""

    def __init__(self, config: RouterConfig, policy: RouterPart) -> None:
        self.config = config
        self.policy = policy
        self.clock = EventClock()
        # Which processes are up, and which links work.
        self.cluster = ClusterState(policy.config)
        self.link_health = LinkHealth(self.clock)
        # Which requests exist, and how many are in which phase.
        self.requests = RequestTable()
        self.counts = RequestCounts()
        # Requests that wait.
        self.prefill_queue = PrefillQueue(policy)
        self.decode_queue = DecodeQueue(self.prefill_queue.turns(True), self.prefill_queue.turns(False))
        # How many times all KV that requests share was forgotten.
        self.era = 0
        # What the pool will have to hold.
        self.demand = PoolDemand(self.cluster)
        # What is to be sent.
        self.output = OutputCoalescing()
        self.outbox = Outbox(self.cluster, self.output)
        # What happened.
        self.counters = Counters()
        self.island = IslandView(self)
        self.island_for_prompts = IslandForPrompts(self)


class IslandView:
    """The island as policies see it, read-only. See `scheduling/island.py`."""

    def __init__(self, router: RouterState) -> None:
        self._clock = router.clock
        self._requests = router.requests
        self._demand = router.demand
        self.cluster = router.cluster
        self.prefill_queue = router.prefill_queue
        self._decode_queue = router.decode_queue

    @property
    def decode_queue(self) -> DecodeQueue:
        return self._decode_queue

    @property
    def now(self) -> float:
        return self._clock.now

    @property
    def reserving(self) -> TokenCounts:
        return self.prefill_queue.reserving

    @property
    def pinned(self) -> Collection[RoutedRequest]:
        return self.prefill_queue.pinned.values()

    @property
    def num_be(self) -> int:
        return self._demand.num_be

    @property
    def common_share(self) -> float:
        return self._demand.common_share

    def expected_output(self, request: RoutedRequest) -> int:
        return self._demand.expected_output(self._requests[request.key])

    def num_known(self, request: RoutedRequest) -> int:
        views = self.cluster.prefills
        if not views or not views[0].hello.limits.enable_prefix_caching:
            return 0
        hashes = self._requests[request.key].prefix_hashes
        num_known = max(view.prompts.prefix_affinity.num_cached_tokens(hashes) for view in views)
        return max(num_known - request.num_cached, 0)

    def has_room_for(self, request: RoutedRequest, be_share: float, share: float) -> bool:
        return self._demand.has_room_for(self._requests[request.key], be_share, share)


class IslandForPrompts(IslandView):
    """The island as policies see it when they start prompts. On colocated instances prompts wait for requests that
    return from the pool. Those of other owners don't count if it is the turn of the prompt's owner."""

    def __init__(self, router: RouterState) -> None:
        super().__init__(router)
        self._none_returning = DecodeQueue(OwnerTurns(), OwnerTurns())

    @property
    def decode_queue(self) -> DecodeQueue:
        return self._none_returning if self._is_turn_of_prompt() else self._decode_queue

    def _is_turn_of_prompt(self) -> bool:
        returning, turns = self._decode_queue.owners, self.prefill_queue.turns(True)
        owner = self.prefill_queue.next_owner(True)
        if owner is None or owner in returning or not (returning and self.cluster.is_colocated):
            return False
        return all(turns.served(owner) < turns.served(each) for each in returning)
