"""The RT fast path: real time goes to a decode instance as soon as its prompt is computed, if best effort can make
room for it. If not, batches of similar lengths serve real time best (`batches.py`). Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from alignedserve.scheduling.island import Assign, DecodeView, RoutedRequest
from alignedserve.types import InstanceId

# At most so many waiting real-time requests are looked at for one event.
MOST = 256


def expect_at(request: RoutedRequest, views: Sequence[DecodeView]) -> DecodeView | None:
    """The instance with least real time; of two with equally much, one where no best effort has to leave."""

    def load(view: DecodeView) -> tuple[int, bool, int]:
        has_room = view.num_available_slots > 0 and view.num_available_blocks >= view.blocks_to_run(request)
        return view.num_rt + len(view.coming), not has_room, -view.num_blocks_for_rt

    return min(views, key=load, default=None)


def assign(requests: Iterable[RoutedRequest], views: Sequence[DecodeView]) -> list[Assign]:
    """Assigns requests that are due first first, each to the instance which expects it, or to the one with least real
    time; of two with equally much, to one where no best effort has to leave. It assigns no more than fits."""
    blocks = {view.instance_id: view.num_blocks_for_rt for view in views if view.num_slots_for_rt > 0}
    slots = {view.instance_id: view.num_slots_for_rt for view in views}
    idle = {
        view.instance_id: view.num_available_blocks if view.num_available_slots > 0 else 0 for view in views
    }
    load = {view.instance_id: view.num_rt for view in views}
    chosen: dict[InstanceId, list[RoutedRequest]] = {}
    for request in sorted(requests, key=_due_s) if blocks else ():
        needed, expected_at = views[0].blocks_to_run(request), request.expected_at
        fitting = [name for name, num_free in blocks.items() if needed <= num_free]
        if not fitting:
            continue
        best = min(
            fitting,
            key=lambda name: (name != expected_at, load[name], idle[name] < needed, -blocks[name]),
        )
        chosen.setdefault(best, []).append(request)
        blocks[best] -= needed
        slots[best] -= 1
        load[best] += 1
        if not slots[best]:
            del blocks[best]
    return [Assign(name, found, is_urgent=True) for name, found in chosen.items()]


def _due_s(request: RoutedRequest) -> float:
    return request.deadlines.token_due_s(request.num_output)
