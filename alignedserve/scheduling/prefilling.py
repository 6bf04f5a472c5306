"""What policies of prefill instances have in common. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.scheduling.boundary import AnyPrefill, PrefillBoundary, PrefillRequest

# whether a prompt may start that needs so many blocks
MayStart = Callable[[PrefillBoundary, int], bool]


def fits(at: PrefillBoundary, num_blocks: int) -> bool:
    return num_blocks <= at.num_free_blocks and at.num_free_slots > 0


def start_while(at: PrefillBoundary, members: Iterable[PrefillRequest], may_start: MayStart) -> None:
    """Those that still wait, in order, until one may not. Who waits for another prompt keeps nobody from starting."""
    for member in members:
        if not at.is_waiting(member) or at.had_better_wait(member):
            continue
        if not may_start(at, at.blocks_for(member)):
            break
        at.start(member)


def chunk_in_order(at: PrefillBoundary, members: Iterable[PrefillRequest]) -> None:
    """As many tokens as are allowed, however long that takes."""
    for member in members:
        if at.num_tokens_left == 0:
            break
        at.chunk(member, min(member.num_pending, at.num_tokens_left))


def real_time_first(members: Iterable[AnyPrefill]) -> list[AnyPrefill]:
    return sorted(members, key=lambda member: not member.is_rt)
