"""The express way: real time goes to a decode instance as soon as its prompt is computed, if best effort can make room
for it. If not, batches of like lengths serve real time best (policies/aligned.py)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.router.entry import Entry
from alignedserve.router.fleet import DecodeView
from alignedserve.router.policies.base import Assign
from alignedserve.types import InstanceId


def express(entries: Iterable[Entry], views: Sequence[DecodeView]) -> list[Assign]:
    """Those that are due first go first, each to where it is expected, or to the instance with least real time; of two
    with as much, to one where nobody has to make room. Not more than fits."""
    blocks = {view.instance_id: view.num_blocks_for_rt for view in views if view.num_slots_for_rt > 0}
    slots = {view.instance_id: view.num_slots_for_rt for view in views}
    idle = {
        view.instance_id: view.num_unspoken_blocks if view.num_unspoken_slots > 0 else 0 for view in views
    }
    load = {view.instance_id: view.num_rt for view in views}
    chosen: dict[InstanceId, list[Entry]] = {}
    for entry in sorted(entries, key=_due_s) if blocks else ():
        needed = len(entry.blocks) + 1
        fitting = [name for name, num_free in blocks.items() if needed <= num_free]
        if not fitting:
            continue
        best = min(
            fitting,
            key=lambda name: (name != entry.expected_at, load[name], idle[name] < needed, -blocks[name]),
        )
        chosen.setdefault(best, []).append(entry)
        blocks[best] -= needed
        slots[best] -= 1
        load[best] += 1
        if not slots[best]:
            del blocks[best]
    return [Assign(name, found, is_batch=False) for name, found in chosen.items()]


def _due_s(entry: Entry) -> float:
    return entry.deadlines.token_due_s(len(entry.output))
