"""Which prompts start, and which prompts of best effort (BE) are preempted for real time (RT; `victims.py`). Pure.

BE starts only while some blocks and a slot stay free for RT. If RT finds none all the same, BE prompts are preempted:
what was computed is in the pool, and is not computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from alignedserve.scheduling import prefilling
from alignedserve.scheduling.boundary import PrefillBoundary, PrefillRequest
from alignedserve.scheduling.policies.aligned.prefill.mixing import Mixing
from alignedserve.scheduling.policies.aligned.prefill.victims import victims

InOrder = Callable[[Sequence[PrefillRequest], float], Sequence[PrefillRequest]]


def admit(at: PrefillBoundary, mixing: Mixing, in_order: InOrder) -> None:
    waiting, first = in_order(at.waiting, at.now), at.short_of_blocks
    be = [request for request in waiting if not request.is_rt]
    owed = be[:1] if mixing.is_owed and not at.is_be_started else []
    urgent = owed + [request for request in waiting if request.is_rt]
    if first is None or not first.is_rt:
        prefilling.admit_while(at, urgent, prefilling.fits)
    lacking = next((request for request in urgent if _wants_to_start(at, request)), None)
    if first is None and lacking is None:
        prefilling.admit_while(at, be, lambda at, num_blocks: _leaves_headroom(at, mixing, num_blocks))
    wanted = first if first is not None and first.is_rt else lacking
    if wanted is not None and wanted.is_rt:
        _make_room(at, mixing, wanted, in_order)


def _wants_to_start(at: PrefillBoundary, request: PrefillRequest) -> bool:
    return at.is_waiting(request) and not at.had_better_wait(request)


def _leaves_headroom(at: PrefillBoundary, mixing: Mixing, num_blocks: int) -> bool:
    """Best effort that is alone may take all blocks, because it can be preempted."""
    if not at.is_be_started:
        return prefilling.fits(at, num_blocks)
    return prefilling.fits(at, num_blocks + mixing.num_headroom_blocks) and at.num_free_slots > 1


def _make_room(at: PrefillBoundary, mixing: Mixing, wanted: PrefillRequest, in_order: InOrder) -> None:
    """Preempts best effort for this prompt of real time, if that is of use."""
    missing = at.blocks_for(wanted) - at.num_free_blocks - at.num_blocks_to_come
    needs_slot = at.is_waiting(wanted) and at.num_free_slots <= 0
    be = in_order([each for each in at.computing if not each.is_rt], at.now)
    for victim in victims(be[mixing.is_owed :], missing, needs_slot):
        at.preempt(victim)
