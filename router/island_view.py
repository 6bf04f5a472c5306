"""The island as policies see it: the router's owners of state, read-only. See `scheduling/island.py`."""

from __future__ import annotations

from collections.abc import Collection

from alignedserve.router.clock import Clock
from alignedserve.router.cluster_state import ClusterState
from alignedserve.router.decode_queue import DecodeQueue
from alignedserve.router.pool_demand import PoolDemand
from alignedserve.router.prefill_queue import PrefillQueue
from alignedserve.router.request_table import RequestTable
from alignedserve.router.token_counts import TokenCounts
from alignedserve.scheduling.island import RoutedRequest
from alignedserve.types import RequestKey


class IslandView:
    def __init__(
        self,
        clock: Clock,
        cluster: ClusterState,
        requests: RequestTable,
        prefill_queue: PrefillQueue,
        decode_queue: DecodeQueue,
        demand: PoolDemand,
    ) -> None:
        self._clock = clock
        self._requests = requests
        self._demand = demand
        self.cluster = cluster
        self.prefill_queue = prefill_queue
        self.decode_queue = decode_queue

    @property
    def now(self) -> float:
        return self._clock.now

    @property
    def reserving(self) -> TokenCounts:
        return self.prefill_queue.reserving

    @property
    def pinned(self) -> Collection[RequestKey]:
        return self.prefill_queue.pinned

    @property
    def num_be(self) -> int:
        return self._demand.num_be

    def expected_output(self, request: RoutedRequest) -> int:
        return self._demand.expected_output(self._requests[request.key])

    def num_known(self, request: RoutedRequest) -> int:
        views = self.cluster.prefills
        if request.num_cached or not views or not views[0].hello.limits.enable_prefix_caching:
            return 0
        hashes = self._requests[request.key].prefix_hashes
        return max(view.prompts.prefix_affinity.num_cached_tokens(hashes) for view in views)

    def has_room_for(self, request: RoutedRequest, be_share: float, share: float) -> bool:
        return self._demand.has_room_for(self._requests[request.key], be_share, share)
