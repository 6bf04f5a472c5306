"""Who leaves a decode instance when blocks or slots run out. Pure.

Best effort (BE) goes before real time (RT). Of BE, whose job can wait goes before who has to run on; then whoever gives
most for what has to be moved: the blocks that the pool does not have yet, over the tokens that are still to come. Of
RT, and where there are no deadlines, the longest of the older batch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from alignedserve.decode_worker.members import Member
from alignedserve.types import RequestKey


def by_length(members: Iterable[Member], named: Collection[RequestKey], has_classes: bool) -> list[Member]:
    """Those that were named before stay named."""
    return sorted(
        members,
        key=lambda member: (
            member.key not in named,
            has_classes and member.is_rt,
            member.batch,
            -member.num_tokens,
        ),
    )


def by_worth(
    members: Iterable[Member],
    named: Collection[RequestKey],
    block_size: int,
    is_pressed: Callable[[Member], bool],
) -> list[Member]:
    def order(member: Member) -> tuple[bool, bool, bool, float, int]:
        is_named = member.key in named
        if member.is_rt:
            return not is_named, True, False, member.batch, -member.num_tokens
        num_to_move = member.num_blocks - member.work.num_cached // block_size
        return not is_named, False, is_pressed(member), num_to_move / member.num_left, -member.num_blocks

    return sorted(members, key=order)
