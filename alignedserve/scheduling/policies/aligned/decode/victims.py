"""Who leaves a decode instance when blocks or slots run out. Pure.

Best effort (BE) goes before real time (RT). Of BE, whose job can wait goes before who has to run on; then whoever gives
most for what has to be moved: the blocks that the pool does not have yet, over the tokens that are still to come. Of
RT, the longest of the older batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest

# the mark of best effort that was owed its place: it is not evicted for real time
OWED = "owed"


def by_worth(
    requests: Iterable[DecodeRequest], at: DecodeBoundary, is_pressed: Callable[[DecodeRequest], bool]
) -> list[DecodeRequest]:
    """Those that were named before stay named."""
    block_size = at.limits.block_size

    def order(request: DecodeRequest) -> tuple[bool, bool, bool, float, int]:
        is_new = not at.was_evicted(request)
        if request.is_rt:
            return is_new, True, False, request.batch, -request.num_tokens
        num_to_move = request.num_blocks - request.num_pooled // block_size
        return is_new, False, is_pressed(request), num_to_move / request.num_left, -request.num_blocks

    return sorted(requests, key=order)
