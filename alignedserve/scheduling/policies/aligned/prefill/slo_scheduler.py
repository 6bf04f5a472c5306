"""The SLO scheduler of a prefill instance: divides iterations between real time (RT) and best effort (BE), and sets how
many blocks BE leaves free. Pure. See `part.py`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import PrefillBoundary, PrefillRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.prefill.chunks import Cut
from alignedserve.scheduling.policies.aligned.rt_beside_be import (
    BeCredit,
    SlidingMaximum,
    SlidingMinimum,
    headroom_blocks,
    num_enough,
)
from alignedserve.timing.deadlines import UNSTATED_TTFT_S
from alignedserve.timing.estimate import Estimate
from alignedserve.types import RequestKey

# With recent RT, BE chunks are only as long as this share of the highest pace needs.
ENOUGH = 0.95
# The least share of its pace that BE has. Shorter chunks would keep the instance busy for more time than they save RT.
LEAST = 0.6
# Seconds after which the chunk sizes for these shares are computed again. They change with the measured cost of
# iterations outside the engine.
CHOOSE_S = 1.0
# The share by which BE may lengthen an iteration with RT.
MAX_STRETCH = 0.05


class PrefillSloScheduler:
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate) -> None:
        self._estimate = estimate
        self._limits = limits
        self._config = config
        # Chunk sizes in tokens for the shares LEAST and ENOUGH of the pace, and when they were computed.
        self._num_least, self._num_enough, self._chosen_s = 0, 0, -math.inf
        self._credit = BeCredit(config.be_share)
        # The objectives of recent RT in seconds, and its lengths in tokens.
        self._objectives, self._lengths = SlidingMinimum(), SlidingMaximum()
        # The tightest recent TTFT objective, and the share of it that an iteration of BE may take, in seconds. Whether
        # RT was seen within the sliding window. The number of blocks that BE leaves free.
        self._tightest_s = 0.0
        self._bound_s = 0.0
        self._is_rt_known = False
        self.num_headroom_blocks = 0
        # The prompt that is in pieces, by whether it is RT.
        self._begun: dict[bool, RequestKey] = {}

    def look(self, at: PrefillBoundary) -> None:
        """Updates the sliding windows, the credit and the headroom from all prompts. Called before each plan."""
        is_be_there, now = False, at.now
        for request in chain(at.started, at.waiting):
            is_be_there |= not request.is_rt and request.num_pending > 0
            if request.is_rt and request.num_pending:
                ttft_s = request.ttft_s
                self._objectives.add(UNSTATED_TTFT_S if ttft_s is None else ttft_s, now)
                self._lengths.add(request.num_tokens, now)
        self._tightest_s = self._objectives.value(UNSTATED_TTFT_S, now)
        self._bound_s = self._config.chunk_share * self._tightest_s
        self._is_rt_known = self._lengths.value(0, now) > 0
        if self._is_rt_known and now - self._chosen_s >= CHOOSE_S:
            self._num_least, self._num_enough = self._nums_for_pace()
            self._chosen_s = now
        self._credit.pass_time(now, is_be_there, self._max_credit_s)
        longest = self._lengths.value(0, now)
        self.num_headroom_blocks = headroom_blocks(self._limits, self._config.rt_headroom, longest)

    def _alone_s(self) -> float:
        """Returns the seconds that an iteration of BE without RT may take, credit included."""
        if not self._is_rt_known:
            return self._bound_s
        least_s = self._estimate.iteration([(0, self._num_least)], [])
        return min(max(self._bound_s, least_s), max(self._enough_s, self._credit.seconds))

    @property
    def _enough_s(self) -> float:
        return self._estimate.iteration([(0, self._num_enough)], []) if self._num_enough else 0.0

    def _nums_for_pace(self) -> tuple[int, int]:
        """Returns the chunk sizes in tokens for LEAST and ENOUGH. They are shares of the pace of the fastest chunk,
        which need not be the longest: attention slows long chunks."""
        block_size = self._limits.block_size
        most = max(self._limits.max_num_batched_tokens // block_size, 1)

        def seconds(num_blocks: int) -> float:
            return self._estimate.iteration([(0, num_blocks * block_size)], [])

        fastest = max(range(1, most + 1), key=lambda count: count / seconds(count))
        least, enough = (num_enough(fastest, seconds, share) for share in (LEAST, ENOUGH))
        return least * block_size, enough * block_size

    @property
    def is_owed(self) -> bool:
        """Whether BE has its full credit, so that one BE request goes before RT."""
        return self._config.be_share > 0 and self._credit.seconds >= self._max_credit_s

    @property
    def _max_credit_s(self) -> float:
        """The most credit in seconds. It always pays for one block at any position of a prompt."""
        block_size = self._limits.block_size
        last_block = (max(self._limits.max_model_len - block_size, 0), block_size)
        return max(self._bound_s, self._estimate.iteration([last_block], []))

    def cut(
        self, requests: Sequence[PrefillRequest], max_tokens: int, may_fill: bool
    ) -> list[tuple[PrefillRequest, int]]:
        """Returns the chunks of these requests, which are in order, in tokens. BE gets either its credit before RT, or
        what RT leaves."""
        cut = Cut(self._estimate, self._limits.block_size, max_tokens)
        rt = [request for request in requests if request.is_rt]
        be = [request for request in requests if not request.is_rt]
        if rt or not may_fill:
            # The fixed cost of the iteration counts as RT's.
            least_s = self._estimate.iteration([(rt[0].num_computed, 1)], []) if rt else 0.0
            self._cut_class(cut, be, least_s + self._credit.seconds, has_floor=False)
        owed = len(cut.chunks)
        # RT computes at nearly its full pace, however tight an objective is. A slower pace would make more of it late.
        self._cut_class(cut, rt, max(self._tightest_s, self._enough_s), has_floor=True)
        if may_fill and not owed:
            bound_s = cut.seconds * (1 + MAX_STRETCH) if cut.chunks else self._alone_s()
            self._cut_class(cut, be, bound_s, has_floor=not cut.chunks)
        self._credit.spend(cut.seconds - cut.seconds_without(be))
        return [(request, cut.chunks[request.key][1]) for request in cut.requests]

    def _cut_class(
        self, cut: Cut, requests: Sequence[PrefillRequest], bound_s: float, has_floor: bool
    ) -> None:
        if not requests:
            return
        is_rt = requests[0].is_rt
        begun = next((request for request in requests if request.key == self._begun.get(is_rt)), None)
        if in_pieces := cut.add(requests, begun, bound_s, has_floor):
            self._begun[is_rt] = in_pieces.key
