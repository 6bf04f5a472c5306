"""Which best-effort prompts are preempted for a request of real time. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from alignedserve.scheduling.boundary import PrefillRequest


def victims(requests: Sequence[PrefillRequest], num_blocks: int, needs_slot: bool) -> list[PrefillRequest]:
    """As many prompts as hold so many blocks, and a slot if one is needed; none if all of them together do not.

    Those that have least to load again go first, and among those with equally much the later in `requests`.
    """
    in_order = sorted(enumerate(requests), key=lambda each: (each[1].num_computed, -each[0]))
    chosen: list[PrefillRequest] = []
    for _, request in in_order:
        if num_blocks <= 0 and not needs_slot:
            break
        chosen.append(request)
        num_blocks, needs_slot = num_blocks - request.num_blocks, False
    return chosen if num_blocks <= 0 and not needs_slot else []
