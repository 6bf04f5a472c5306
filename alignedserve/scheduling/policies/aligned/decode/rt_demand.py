"""The real time (RT) that a decode instance makes way for: what it has seen lately, and what is about to join. Pure.

- **Seen lately.** The tightest objective bounds iterations; the longest request says how much headroom best effort (BE)
  leaves.
- **About to join.** The router has announced it, or its KV is on its way. While it is near, iterations are short, so
  that RT does not wait long for one that has just begun; and none begins in the moment in which its KV is on its way.
  Copies of BE, which RT's copies would have to wait for, do not begin either.
"""

from __future__ import annotations

import math

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.rt_beside_be import (
    SlidingMaximum,
    SlidingMinimum,
    headroom_blocks,
    headroom_slots,
)

# While KV of RT is on its way, no iteration begins for this share of the tightest recent objective.
HOLD = 0.25
# The longest time that copies of BE's KV wait, in seconds.
MAX_BARRED_S = 0.5
# The objective in seconds of RT that has none.
DEFAULT_TBT_S = 0.1
# Seconds between two looks at the running requests: with hundreds, looking takes a noticeable part of a short
# iteration.
LOOK_S = 1.0


class RtDemand:
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig) -> None:
        self._limits = limits
        self._config = config
        # The objectives of recent RT in seconds, and its lengths in tokens.
        self._objectives, self._lengths = SlidingMinimum(), SlidingMaximum()
        # The time of the last boundary.
        self._now_s = 0.0
        # When the running requests were last looked at.
        self._looked_s = -math.inf
        self.num_headroom_blocks = 0
        self.num_headroom_slots = headroom_slots(limits, config.rt_headroom)
        # Whether KV of RT is on its way here.
        self._is_pulled = False
        # The announced RT, by state: it will be offered in a moment.
        self._num_prefilling = 0
        self._num_ready = 0
        # Until when no iteration begins for the sake of RT, and until when iterations are short.
        self._hold_until_s = self._near_until_s = -math.inf
        # When BE might last be pulled.
        self._open_s = -math.inf

    def look(self, at: DecodeBoundary) -> None:
        """Notes all real time here; called before a plan."""
        now = self._now_s = at.now
        pulled = at.arriving
        self._is_pulled = any(request.is_rt for request in pulled)
        is_time = now - self._looked_s >= LOOK_S
        for request in (*pulled, *at.requests, *at.batch, *(at.running if is_time else ())):
            if request.is_rt:
                if request.deadlines.tbt_s < math.inf:
                    self._objectives.add(request.deadlines.tbt_s, now)
                self._lengths.add(request.num_tokens, now)
        if is_time:
            self._looked_s = now
        longest = self._lengths.value(0, now)
        self.num_headroom_blocks = headroom_blocks(self._limits, self._config.rt_headroom, longest)

    # ---- seen lately ------------------------------------------------------------------------------------------------

    @property
    def tightest_s(self) -> float:
        """The tightest objective that was seen lately; infinite if there is none."""
        return self._objectives.value(math.inf, self._now_s)

    def least_headroom(self) -> tuple[int, int]:
        """Returns the blocks and slots to which headroom is restored at the cost of BE, where RT was seen lately:
        enough for one request like those."""
        longest = self._lengths.value(0, self._now_s)
        if not longest or not self.num_headroom_slots:
            return 0, 0
        of_longest = self._limits.span.num_held(int(longest), int(longest))
        return min(of_longest, self.num_headroom_blocks), 1

    # ---- about to join ----------------------------------------------------------------------------------------------

    def expect(self, num_prefilling: int, num_ready: int, now: float) -> None:
        if num_ready > self._num_ready:
            self._hold(now)
        self._num_prefilling, self._num_ready = num_prefilling, num_ready

    def pulls(self) -> None:
        """Notes that a copy of RT's KV has begun at this boundary."""
        self._is_pulled = True
        self._hold(self._now_s)

    def _hold(self, now: float) -> None:
        tightest_s = self._objectives.value(DEFAULT_TBT_S, now)
        self._hold_until_s, self._near_until_s = now + HOLD * tightest_s, now + tightest_s

    @property
    def is_near(self) -> bool:
        is_ready = self._num_ready and self._now_s < self._near_until_s
        return bool(self._is_pulled or self._num_prefilling or is_ready)

    @property
    def hold_s(self) -> float:
        """The seconds that an iteration should wait for RT's KV."""
        return self._hold_until_s - self._now_s if self._is_pulled or self._num_ready else 0.0

    def may_pull_be(self) -> bool:
        """Returns whether copies of BE's KV may begin at this boundary, and notes it if so."""
        may = not self.is_near or self._now_s - self._open_s >= MAX_BARRED_S
        if may:
            self._open_s = self._now_s
        return may
