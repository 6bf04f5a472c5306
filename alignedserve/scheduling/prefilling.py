"""Helpers of prefill policies. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.scheduling.boundary import AnyPrefill, PrefillBoundary, PrefillRequest

# Whether a prompt that needs this many blocks may start.
MayAdmit = Callable[[PrefillBoundary, int], bool]


def fits(at: PrefillBoundary, num_blocks: int) -> bool:
    return num_blocks <= at.num_free_blocks and at.num_free_slots > 0


def admit_while(at: PrefillBoundary, requests: Iterable[PrefillRequest], may_admit: MayAdmit) -> None:
    """Starts the waiting prompts, in order, until one may not start. A prompt that waits for another one does not hold
    up the rest."""
    for request in requests:
        if not at.is_waiting(request) or at.should_wait(request):
            continue
        if not may_admit(at, at.blocks_for(request)):
            break
        at.admit(request)


def chunk_in_order(at: PrefillBoundary, requests: Iterable[PrefillRequest]) -> None:
    """Computes as many tokens as are allowed, however long that takes."""
    for request in requests:
        if at.num_tokens_left == 0:
            break
        at.chunk(request, min(request.num_pending, at.num_tokens_left))


def real_time_first(requests: Iterable[AnyPrefill]) -> list[AnyPrefill]:
    return sorted(requests, key=lambda request: not request.is_rt)
