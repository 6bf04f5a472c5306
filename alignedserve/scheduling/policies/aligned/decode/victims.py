"""Which requests leave a decode instance when blocks or slots run out. Pure.

Best effort (BE) goes before real time (RT). Of BE, requests whose job can wait go before those which have to run on;
then those with the fewest blocks to move (the blocks which the pool does not have yet) per token that is still to
come. Of RT, the longest of the older batch goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest

# This marks best effort that was admitted on credit: it is not evicted for real time.
OWED = "owed"


def by_worth(
    requests: Iterable[DecodeRequest], at: DecodeBoundary, is_pressed: Callable[[DecodeRequest], bool]
) -> list[DecodeRequest]:
    """Requests whose eviction was wanted at the last boundary stay in front."""
    span = at.limits.span

    def order(request: DecodeRequest) -> tuple[bool, bool, bool, float, int]:
        is_new = not at.was_evicted(request)
        if request.is_rt:
            return is_new, True, False, request.batch, -request.num_tokens
        # The columns that the pool has.
        end = request.num_pooled // span.block_size
        num_to_move = request.num_blocks - span.num_blocks(min(request.num_passed, end), end)
        return is_new, False, is_pressed(request), num_to_move / request.num_left, -request.num_blocks

    return sorted(requests, key=order)
