"""Helpers for the parts of `aligned` that share an instance between real time (RT) and best effort (BE). Pure.

- **BE credit** is the instance time that BE is owed.
- **Headroom** is the number of blocks and slots that BE leaves free for RT.
- **Sufficient pace** is reached with the smallest amount of BE that still has most of the possible throughput. Every
  iteration has fixed costs. A fuller one therefore raises BE's throughput, but RT waits longer for its end. Most of
  the throughput is reached long before all BE is in the iteration. RT gets the time that is left.
"""

from __future__ import annotations

from collections.abc import Callable

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.timing.estimate import num_enough

# The largest share of all blocks that is kept free for the length of recent RT requests. BE can have the rest.
MAX_HEADROOM_SHARE = 0.25
# Length of an iteration with prompts beside streams that will be late anyway, as a multiple of one without prompts.
# At 2, prompts get half of the time.
LATE = 2.0
# The share of the highest pace that RT prompts need, and BE prompts beside recent RT without an objective. Their chunks
# then take 0.5 to 0.9 of the time of the fastest chunk of up to 2,048 tokens (cost_presets.json).
ENOUGH = 0.95


# ---- BE credit -------------------------------------------------------------------------------------------------------


class BeCredit:
    """The instance time that BE is owed, in seconds. It grows by a share of the time while any BE is present."""

    def __init__(self, share: float) -> None:
        self._share = share
        self._then_s: float | None = None
        self.seconds = 0.0

    def pass_time(self, now: float, is_be_there: bool, most_s: float) -> None:
        """Adds the share of the time since the last call, if BE is present now. Credit above `most_s` is lost."""
        if self._then_s is not None and is_be_there:
            self.seconds += self._share * max(now - self._then_s, 0.0)
        self._then_s = now
        self.seconds = min(self.seconds, most_s)

    def spend(self, seconds: float) -> None:
        """Spends credit on BE. Credit never falls below 0, so BE owes nothing for time that it got beyond it."""
        self.seconds = max(self.seconds - seconds, 0.0)


# ---- headroom --------------------------------------------------------------------------------------------------------


def headroom_blocks(limits: InstanceLimits, share: float, longest: float) -> int:
    """Returns the number of blocks that BE leaves free: `share` of all blocks, or those of a request of `longest`
    tokens (up to MAX_HEADROOM_SHARE) if that is more. Returns 0 if `share` is 0."""
    if not share:
        return 0
    of_longest = min(limits.span.num_held(int(longest), int(longest)), MAX_HEADROOM_SHARE * limits.num_blocks)
    return int(max(share * limits.num_blocks, of_longest))


def headroom_slots(limits: InstanceLimits, share: float) -> int:
    """Returns the number of slots that BE leaves free: `share` of all slots, but at least one. Returns 0 if `share` is
    0 or the instance has a single slot."""
    return max(int(share * limits.max_num_seqs), 1) if share and limits.max_num_seqs > 1 else 0


# ---- pace ------------------------------------------------------------------------------------------------------------


def nums_for_pace(limits: InstanceLimits, seconds: Callable[[int], float], *shares: float) -> list[int]:
    """Returns the smallest chunk sizes in tokens with these shares of the pace of the fastest chunk, which need not be
    the longest: attention slows long chunks. `seconds(count)` returns the seconds of a chunk of `count` tokens."""
    block_size = limits.block_size

    def of_blocks(num_blocks: int) -> float:
        return seconds(num_blocks * block_size)

    most = max(limits.max_num_batched_tokens // block_size, 1)
    fastest = max(range(1, most + 1), key=lambda count: count / of_blocks(count))
    return [num_enough(fastest, of_blocks, share) * block_size for share in shares]
