"""Tracks the real time (RT) for which a decode instance keeps time and room: recent and about to join. Pure.

- **Recent.** The tightest objective bounds iterations. The longest request sets how much headroom best effort (BE)
  leaves.
- **About to join.** The router has announced it, or its KV is on its way. Iterations are short meanwhile, so that RT
  does not wait long for one that has just begun. None begins for a moment after RT is ready or its copy has begun.
  Copies of BE's KV are put off as well, because RT's copies would wait for them.
"""

from __future__ import annotations

import math

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import DecodeBoundary
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.rt_beside_be import headroom_blocks, headroom_slots
from alignedserve.timing.sliding import SlidingMaximum, SlidingMinimum

# The longest hold of an iteration for RT's KV, as a share of the tightest recent objective. Halving or doubling it
# changes nothing in four scenarios, and MAX_BARRED_S less than half a point (benchmarks.arena.sweep).
HOLD = 0.25
# The longest time that copies of BE's KV are put off, in seconds.
MAX_BARRED_S = 0.5
# TBT objective in seconds that is assumed while no recent RT has one. People read fewer than ten tokens per second.
DEFAULT_TBT_S = 0.1
# Seconds between two scans of the running requests. With hundreds of them, a scan takes a noticeable part of a short
# iteration.
LOOK_S = 1.0


class RtDemand:
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig) -> None:
        self._limits = limits
        self._config = config
        # The objectives of recent RT in seconds, and its lengths in tokens.
        self._objectives, self._lengths = SlidingMinimum(), SlidingMaximum()
        # Has a value if recent RT asked for no TBT objective: its tokens are wanted as soon as possible.
        self._hurried = SlidingMinimum()
        # The time of the last boundary.
        self._now_s = 0.0
        # When the running requests were last scanned.
        self._looked_s = -math.inf
        self.num_headroom_blocks = 0
        self.num_headroom_slots = headroom_slots(limits, config.rt_headroom)
        # Whether KV of RT is on its way here.
        self._is_pulled = False
        # The numbers of announced RT requests: those at prefill, and those that will be offered in a moment.
        self._num_prefilling = 0
        self._num_ready = 0
        # Until when iterations are held for RT's KV, and until when ready RT keeps them short.
        self._hold_until_s = self._near_until_s = -math.inf
        # When copies of BE's KV were last allowed to begin.
        self._open_s = -math.inf

    def look(self, at: DecodeBoundary) -> None:
        """Updates the sliding windows and the headroom from the RT here. Called before each plan."""
        now = self._now_s = at.now
        pulled = at.arriving
        self._is_pulled = any(request.is_rt for request in pulled)
        is_time = now - self._looked_s >= LOOK_S
        for request in (*pulled, *at.requests, *at.batch, *(at.running if is_time else ())):
            if request.is_rt:
                if request.deadlines.tbt_s < math.inf:
                    self._objectives.add(request.deadlines.tbt_s, now)
                if request.deadlines.tbt_s == math.inf or request.deadlines.hurries:
                    self._hurried.add(0.0, now)
                self._lengths.add(request.num_tokens, now)
        if is_time:
            self._looked_s = now
        longest = self._lengths.value(0, now)
        self.num_headroom_blocks = headroom_blocks(self._limits, self._config.rt_headroom, longest)

    # ---- recent RT --------------------------------------------------------------------------------------------------

    @property
    def tightest_s(self) -> float:
        """The tightest recent TBT objective in seconds; infinite if there is none."""
        return self._objectives.value(math.inf, self._now_s)

    @property
    def longest(self) -> int:
        """The tokens of the longest recent RT; 0 if there is none."""
        return int(self._lengths.value(0, self._now_s))

    @property
    def has_objectives(self) -> bool:
        """Whether all recent RT has TBT objectives that were asked for."""
        return math.isinf(self._hurried.value(math.inf, self._now_s)) and self.tightest_s < math.inf

    def least_headroom(self) -> tuple[int, int]:
        """Returns the numbers of blocks and slots of headroom for which BE is evicted: enough for one request as long
        as the longest recent RT. Returns (0, 0) without recent RT or without headroom."""
        longest = self._lengths.value(0, self._now_s)
        if not longest or not self.num_headroom_slots:
            return 0, 0
        of_longest = self._limits.span.num_held(int(longest), int(longest))
        return min(of_longest, self.num_headroom_blocks), 1

    # ---- RT about to join -------------------------------------------------------------------------------------------

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
        """Whether RT is about to join."""
        is_ready = self._num_ready and self._now_s < self._near_until_s
        return bool(self._is_pulled or self._num_prefilling or is_ready)

    @property
    def hold_s(self) -> float:
        """The seconds that an iteration should wait for RT's KV; at most 0 if it need not."""
        return self._hold_until_s - self._now_s if self._is_pulled or self._num_ready else 0.0

    def may_pull_be(self) -> bool:
        """Returns whether copies of BE's KV may begin at this boundary. If so, records the time."""
        may = not self.is_near or self._now_s - self._open_s >= MAX_BARRED_S
        if may:
            self._open_s = self._now_s
        return may
