"""What the router says of the island: its load, and the status of each process."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from statistics import fmean

from msgspec.structs import replace

from alignedserve.process.usage import Usage
from alignedserve.protocol.messages import Cluster, Hello, InstanceStats, Load, PoolUse, ProcessStatus
from alignedserve.router.router import Router
from alignedserve.types import Epoch, InstanceId

# ---- load ------------------------------------------------------------------------------------------------------------


# Length of the sliding window, in seconds. A longer iteration counts when it ends.
BUSY_S = 5.0


class LoadMeter:
    """The island's load, from which gateways choose an island and the launcher the number of islands. Pure."""

    def __init__(self, router: Router) -> None:
        self._router = router
        # (time, seconds that each instance had computed until then); the latest last.
        self._readings: deque[tuple[float, Mapping[InstanceId, float]]] = deque()

    def read(self, now: float) -> Load:
        router = self._router
        cluster, queue = router.state.cluster, router.state.prefill_queue
        rt, be = (
            queue.num_tokens_of(is_rt) + sum(view.pending.sum(is_rt) for view in cluster.prefills)
            for is_rt in (True, False)
        )
        has_room = any(view.num_slots_for_rt > 0 and view.num_blocks_for_rt > 0 for view in cluster.decodes)
        return Load(
            num_requests=sum(router.state.counts.by_phase.values()),
            busy=self._busy(now),
            num_rt_tokens=rt,
            num_tokens=rt + be,
            num_prefills=len(cluster.prefills),
            num_decodes=len(cluster.decodes),
            tokens_per_s=cluster.prompt_tokens_per_s(),
            is_full=not has_room or bool(router.state.decode_queue.real_time),
            num_cache_tokens=sum(
                view.hello.limits.num_kv_tokens
                for view in cluster.prefills
                if view.hello.limits.enable_prefix_caching
            ),
        )

    def _busy(self, now: float) -> float:
        cluster, counters = self._router.state.cluster, self._router.state.counters
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


# ---- status ----------------------------------------------------------------------------------------------------------

UP, DOWN = "up", "down"
_NEVER = Epoch(0)

# Returns what a process of this host uses, by its id.
UsageOf = Callable[[int], Usage | None]


def unknown_usage(pid: int) -> Usage | None:
    """Returns None: in a simulation there are no processes."""
    return None


def describe(
    router: Router,
    me: Hello,
    connected: Iterable[Hello],
    expected: Mapping[InstanceId, str],
    pool_use: PoolUse | None,
    ticket: int,
    usage_of: UsageOf = unknown_usage,
) -> Cluster:
    """Returns the status of the island. `expected`: the role of each process that should exist. `pool_use`: the pool's
    last report of its blocks."""
    counts = router.state.counts
    present = [me, *(hello for hello in connected if hello.role != "launcher")]
    processes = [_process_status(router, hello, pool_use, usage_of) for hello in present]
    here = {hello.instance_id for hello in present}
    processes += [_absent(router, role, name) for name, role in expected.items() if name not in here]
    return Cluster(
        ticket,
        sorted(processes, key=_order),
        requests=counts.by_phase,
        tiers=counts.by_tier,
        recoveries=dict(router.state.counters.recoveries),
        sharing=_sharing(router),
        role_changes=dict(router.state.counters.role_changes),
        num_cache_resets=router.state.counters.num_cache_resets,
    )


def _sharing(router: Router) -> dict[str, int]:
    counters = router.state.counters
    return {
        "demoted": router.state.prefill_queue.num_demotions,
        "express": counters.num_fast_path,
        "evicted_for_rt": counters.num_evicted_for_rt,
        "recomputed": counters.num_recomputed,
    }


def _process_status(
    router: Router, hello: Hello, pool_use: PoolUse | None, usage_of: UsageOf
) -> ProcessStatus:
    name = hello.instance_id
    use = pool_use if pool_use and hello.role == "kvpool" else PoolUse(0, 0)
    # A gateway may run on another host. It reads its own.
    usage = (None if hello.role == "gateway" else usage_of(hello.pid)) or Usage()
    return ProcessStatus(
        role=hello.role,
        instance_id=name,
        epoch=hello.epoch,
        pid=hello.pid,
        state=UP,
        num_blocks=hello.limits.num_blocks,
        num_free_blocks=_num_free_blocks(router, hello, pool_use),
        requests=router.state.counts.at_instance(name),
        stats=_stats(router, name, hello.limits.block_bytes),
        started_s=hello.started_s,
        cpu_s=usage.cpu_s,
        resident_bytes=usage.resident_bytes,
        num_kept_blocks=use.num_kept_blocks,
        num_shared_blocks=use.num_shared_blocks,
        num_promised_blocks=use.num_promised_blocks,
        promises=use.promises,
    )


def _stats(router: Router, name: InstanceId, block_bytes: int = 0) -> InstanceStats:
    """Returns the counters of an instance. They outlive its process, so they never decrease."""
    cluster, counted = router.state.cluster, router.state.counters.of(name)
    prefill, decode = cluster.prefill(name), cluster.decode(name)
    report = decode.report if decode else None
    return replace(
        counted,
        scheduling=[*counted.scheduling],
        min_length=report.min_length if report else 0,
        max_length=report.max_length if report else 0,
        staged_bytes=sum(prefill.staging.values()) * block_bytes if prefill else 0,
        moved=[replace(each) for each in counted.moved],
        over_host=router.state.link_health.over_host(name),
    )


def _num_free_blocks(router: Router, hello: Hello, pool_use: PoolUse | None) -> int:
    if hello.role == "kvpool":
        # Like an instance's, blocks that are kept for prompts that begin alike count as free.
        return pool_use.num_free_blocks + pool_use.num_kept_blocks if pool_use else hello.limits.num_blocks
    cluster = router.state.cluster
    view = cluster.prefill(hello.instance_id) or cluster.decode(hello.instance_id)
    return view.num_free_blocks if view else 0


def _absent(router: Router, role: str, name: InstanceId) -> ProcessStatus:
    return ProcessStatus(role, name, _NEVER, 0, DOWN, 0, 0, {}, _stats(router, name))


def _order(process: ProcessStatus) -> tuple[int, str]:
    roles = ("router", "kvpool", "prefill", "decode", "colocated", "gateway")
    return roles.index(process.role), process.instance_id
