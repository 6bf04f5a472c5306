"""What best effort leaves free for real time (RT). Pure."""

from __future__ import annotations

from alignedserve.protocol.messages import InstanceLimits

# Of the blocks, the most that are kept free because an RT request was that long.
MOST = 0.25


def headroom_blocks(limits: InstanceLimits, share: float, longest: float) -> int:
    """A share of them, or room for a request as long as the longest of late; without a share none."""
    if not share:
        return 0
    of_longest = min(-(-longest // limits.block_size), MOST * limits.num_blocks)
    return int(max(share * limits.num_blocks, of_longest))


def headroom_slots(limits: InstanceLimits, share: float) -> int:
    """One at least, if there are others."""
    return max(int(share * limits.max_num_seqs), 1) if share and limits.max_num_seqs > 1 else 0
