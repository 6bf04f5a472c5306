"""What the router says of the island when asked: every process, and how many requests are in which state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from alignedserve.messages import Cluster, Hello, Part, PoolUse
from alignedserve.types import Epoch, InstanceId
from router.entry import Entry
from router.fleet import DecodeView, PrefillView
from router.router import Router

UP, DOWN = "up", "down"
_NEVER = Epoch(0)


def describe(
    router: Router,
    me: Hello,
    connected: Iterable[Hello],
    expected: Mapping[InstanceId, str],
    pool_use: PoolUse | None,
    ticket: int,
) -> Cluster:
    """`expected`: instance id -> role of those that should be there."""
    entries = [entry for entry in router.life.entries.values() if not entry.is_over]
    present = [me, *(hello for hello in connected if hello.role != "launcher")]
    parts = [_part(router, hello, entries, pool_use) for hello in present]
    here = {hello.instance_id for hello in present}
    parts += [_absent(role, name) for name, role in expected.items() if name not in here]
    return Cluster(ticket, sorted(parts, key=_order), dict(Counter(entry.state.value for entry in entries)))


def _part(router: Router, hello: Hello, entries: list[Entry], pool_use: PoolUse | None) -> Part:
    name = hello.instance_id
    states = Counter(entry.state.value for entry in entries if name in (entry.place, entry.staged_at))
    return Part(
        role=hello.role,
        instance_id=name,
        epoch=hello.epoch,
        pid=hello.pid,
        state=UP,
        num_blocks=hello.limits.num_blocks,
        num_free_blocks=_num_free_blocks(router, hello, pool_use),
        requests=dict(states),
    )


def _num_free_blocks(router: Router, hello: Hello, pool_use: PoolUse | None) -> int:
    if hello.role == "kvpool":
        return pool_use.num_free_blocks if pool_use else hello.limits.num_blocks
    fleet = router.life.fleet
    view = fleet.prefill(hello.instance_id) or fleet.decode(hello.instance_id)
    return view.num_free_blocks if isinstance(view, PrefillView | DecodeView) else 0


def _absent(role: str, name: InstanceId) -> Part:
    return Part(role, name, _NEVER, 0, DOWN, 0, 0, {})


def _order(part: Part) -> tuple[int, str]:
    roles = ("router", "kvpool", "prefill", "decode", "gateway")
    return roles.index(part.role), part.instance_id
