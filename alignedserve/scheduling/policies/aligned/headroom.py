"""What best effort leaves free for real time (RT). Pure."""

from __future__ import annotations

from alignedserve.protocol.messages import InstanceLimits

# The largest share of the blocks that is kept free because an RT request was that long.
MOST = 0.25


def headroom_blocks(limits: InstanceLimits, share: float, longest: float) -> int:
    """A share of all blocks, or what the longest recent request needs (up to MOST) if that is more; none without a
    share."""
    if not share:
        return 0
    of_longest = min(limits.span.num_held(int(longest), int(longest)), MOST * limits.num_blocks)
    return int(max(share * limits.num_blocks, of_longest))


def headroom_slots(limits: InstanceLimits, share: float) -> int:
    """The number of slots: at least one, if there are others."""
    return max(int(share * limits.max_num_seqs), 1) if share and limits.max_num_seqs > 1 else 0
