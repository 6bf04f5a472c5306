"""The island's load, from which gateways choose an island and the launcher the number of islands. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import fmean

from alignedserve.protocol.messages import Load
from alignedserve.router.router import Router
from alignedserve.types import InstanceId

# Length of the sliding window, in seconds. A longer iteration counts when it ends.
BUSY_S = 5.0


class LoadMeter:
    def __init__(self, router: Router) -> None:
        self._router = router
        # (time, seconds that each instance had computed until then); the latest last.
        self._readings: deque[tuple[float, Mapping[InstanceId, float]]] = deque()

    def read(self, now: float) -> Load:
        router = self._router
        cluster, queue = router.cluster, router.prefill_queue
        rt, be = (
            queue.num_tokens_of(is_rt) + sum(view.pending.sum(is_rt) for view in cluster.prefills)
            for is_rt in (True, False)
        )
        has_room = any(view.num_slots_for_rt > 0 and view.num_blocks_for_rt > 0 for view in cluster.decodes)
        return Load(
            num_requests=sum(router.counts.by_phase.values()),
            busy=self._busy(now),
            num_rt_tokens=rt,
            num_tokens=rt + be,
            num_prefills=len(cluster.prefills),
            num_decodes=len(cluster.decodes),
            tokens_per_s=cluster.prompt_tokens_per_s(),
            is_full=not has_room or bool(router.decode_queue.real_time),
            num_cache_tokens=sum(
                view.hello.limits.num_kv_tokens
                for view in cluster.prefills
                if view.hello.limits.enable_prefix_caching
            ),
        )

    def _busy(self, now: float) -> float:
        cluster, counters = self._router.cluster, self._router.counters
        # Colocated instances are both.
        roles = [[view.instance_id for view in views] for views in (cluster.prefills, cluster.decodes)]
        computing_s = {name: counters.of(name).computing_s for role in roles for name in role}
        self._readings.append((now, computing_s))
        while len(self._readings) > 1 and self._readings[1][0] <= now - BUSY_S:
            self._readings.popleft()
        since_s, before = self._readings[0]
        seconds = now - since_s

        def share(name: InstanceId) -> float:
            computed_s = computing_s[name] - before.get(name, computing_s[name])
            return min(1.0, computed_s / seconds) if seconds else 0.0

        return max((fmean(map(share, names)) for names in roles if names), default=0.0)
