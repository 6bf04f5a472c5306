"""The router's status report of the island: every process, and how many requests are in which phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from alignedserve.process.usage import Usage
from alignedserve.protocol.messages import Cluster, Hello, InstanceStats, Moved, PoolUse, ProcessStatus
from alignedserve.router.router import Router
from alignedserve.types import Epoch, InstanceId

UP, DOWN = "up", "down"
_NEVER = Epoch(0)

# Returns what a process of this host uses, by its id.
UsageOf = Callable[[int], Usage | None]


def describe(
    router: Router,
    me: Hello,
    connected: Iterable[Hello],
    expected: Mapping[InstanceId, str],
    pool_use: PoolUse | None,
    ticket: int,
    usage_of: UsageOf = lambda pid: None,
) -> Cluster:
    """Returns the status of the island. `expected`: the role of each process that should exist. `pool_use`: the pool's
    last report of its blocks."""
    counts = router.counts
    present = [me, *(hello for hello in connected if hello.role != "launcher")]
    processes = [_process_status(router, hello, pool_use, usage_of) for hello in present]
    here = {hello.instance_id for hello in present}
    processes += [_absent(router, role, name) for name, role in expected.items() if name not in here]
    return Cluster(
        ticket,
        sorted(processes, key=_order),
        requests=counts.by_phase,
        tiers=counts.by_tier,
        recoveries=dict(router.counters.recoveries),
        sharing=_sharing(router),
        role_changes=dict(router.counters.role_changes),
    )


def _sharing(router: Router) -> dict[str, int]:
    counters = router.counters
    return {
        "demoted": router.prefill_queue.num_demotions,
        "express": counters.num_fast_path,
        "evicted_for_rt": counters.num_evicted_for_rt,
        "recomputed": counters.num_recomputed,
    }


def _process_status(
    router: Router, hello: Hello, pool_use: PoolUse | None, usage_of: UsageOf
) -> ProcessStatus:
    name = hello.instance_id
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
        requests=router.counts.at_instance(name),
        stats=_stats(router, name, hello.limits.block_bytes),
        started_s=hello.started_s,
        cpu_s=usage.cpu_s,
        resident_bytes=usage.resident_bytes,
    )


def _stats(router: Router, name: InstanceId, block_bytes: int = 0) -> InstanceStats:
    """Returns the counters of an instance. They outlive its process, so they never decrease."""
    cluster, counted = router.cluster, router.counters.of(name)
    prefill, decode = cluster.prefill(name), cluster.decode(name)
    report = decode.report if decode else None
    return InstanceStats(
        num_preemptions=counted.num_preemptions,
        num_evictions=counted.num_evictions,
        num_spills=counted.num_spills,
        num_batch_switches=counted.num_batch_switches,
        num_batch_iterations=counted.num_batch_iterations,
        num_mixed_iterations=counted.num_mixed_iterations,
        scheduling=[*counted.scheduling],
        scheduling_s=counted.scheduling_s,
        min_length=report.min_length if report else 0,
        max_length=report.max_length if report else 0,
        staged_bytes=sum(prefill.staging.values()) * block_bytes if prefill else 0,
        moved=[Moved(each.what, each.num_bytes, each.seconds) for each in counted.moved.values()],
        num_computed_tokens=counted.num_computed_tokens,
        computing_s=counted.computing_s,
        num_asked_tokens=counted.num_asked_tokens,
        num_found_tokens=counted.num_found_tokens,
        num_failed_pulls=counted.num_failed_pulls,
        over_host=router.link_health.over_host(name),
        num_handed_over=counted.num_handed_over,
    )


def _num_free_blocks(router: Router, hello: Hello, pool_use: PoolUse | None) -> int:
    if hello.role == "kvpool":
        return pool_use.num_free_blocks if pool_use else hello.limits.num_blocks
    cluster = router.cluster
    view = cluster.prefill(hello.instance_id) or cluster.decode(hello.instance_id)
    return view.num_free_blocks if view else 0


def _absent(router: Router, role: str, name: InstanceId) -> ProcessStatus:
    return ProcessStatus(role, name, _NEVER, 0, DOWN, 0, 0, {}, _stats(router, name))


def _order(process: ProcessStatus) -> tuple[int, str]:
    roles = ("router", "kvpool", "prefill", "decode", "colocated", "gateway")
    return roles.index(process.role), process.instance_id
