"""The SLO scheduler of a prefill instance: how real time (RT) and best effort (BE) share its iterations, and how many
blocks BE leaves free. Pure; see `part.py`."""

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

# This share of the highest possible pace is enough while RT comes and goes: chunks are as short as that allows.
ENOUGH = 0.95
# BE has at least this share of its pace: shorter chunks would keep the instance busy for longer than they would spare
# RT.
LEAST = 0.6
# Seconds after which the chunk sizes for these shares are computed again: they depend on what iterations cost outside
# the engine.
CHOOSE_S = 1.0
# An iteration with RT may become longer by this share for the BE that fills it up.
MAX_STRETCH = 0.05


class PrefillSloScheduler:
    def __init__(self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate) -> None:
        self._estimate = estimate
        self._limits = limits
        self._config = config
        # The tokens of BE's chunks, for the least pace and for the pace that is enough; and when they were last
        # computed.
        self._num_least, self._num_enough, self._chosen_s = 0, 0, -math.inf
        self._credit = BeCredit(config.be_share)
        # The objectives of recent RT in seconds, and its lengths in tokens.
        self._objectives, self._lengths = SlidingMinimum(), SlidingMaximum()
        # The seconds that chunks of RT and of BE may take; whether RT was seen lately; and the number of blocks that
        # BE leaves free.
        self._tightest_s = 0.0
        self._bound_s = 0.0
        self._is_rt_known = False
        self.num_headroom_blocks = 0
        # The prompt of each class, by whether it is RT, that is in pieces.
        self._begun: dict[bool, RequestKey] = {}

    def look(self, at: PrefillBoundary) -> None:
        """Notes all prompts; called before a plan."""
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
        """The seconds that chunks of BE may take while RT has nothing to compute, or when BE has credit."""
        if not self._is_rt_known:
            return self._bound_s
        least_s = self._estimate.iteration([(0, self._num_least)], [])
        return min(max(self._bound_s, least_s), max(self._enough_s, self._credit.seconds))

    @property
    def _enough_s(self) -> float:
        return self._estimate.iteration([(0, self._num_enough)], []) if self._num_enough else 0.0

    def _nums_for_pace(self) -> tuple[int, int]:
        """The chunk sizes in tokens: beyond some length attention makes chunks slower again."""
        block_size = self._limits.block_size
        most = max(self._limits.max_num_batched_tokens // block_size, 1)

        def seconds(num_blocks: int) -> float:
            return self._estimate.iteration([(0, num_blocks * block_size)], [])

        fastest = max(range(1, most + 1), key=lambda count: count / seconds(count))
        least, enough = (num_enough(fastest, seconds, share) for share in (LEAST, ENOUGH))
        return least * block_size, enough * block_size

    @property
    def is_owed(self) -> bool:
        """Whether BE has had nothing for so long that one request of it goes before RT."""
        return self._config.be_share > 0 and self._credit.seconds >= self._max_credit_s

    @property
    def _max_credit_s(self) -> float:
        """The most credit in seconds: enough for one block at least, at any position of a prompt."""
        block_size = self._limits.block_size
        last_block = (max(self._limits.max_model_len - block_size, 0), block_size)
        return max(self._bound_s, self._estimate.iteration([last_block], []))

    def cut(
        self, requests: Sequence[PrefillRequest], max_tokens: int, may_fill: bool
    ) -> list[tuple[PrefillRequest, int]]:
        """Returns chunks of these requests, which are in order. BE fills what RT leaves, or gets only its credit."""
        cut = Cut(self._estimate, self._limits.block_size, max_tokens)
        rt = [request for request in requests if request.is_rt]
        be = [request for request in requests if not request.is_rt]
        if rt or not may_fill:
            # RT pays for what an iteration takes at least.
            least_s = self._estimate.iteration([(rt[0].num_computed, 1)], []) if rt else 0.0
            self._cut_class(cut, be, least_s + self._credit.seconds, has_floor=False)
        owed = len(cut.chunks)
        # However tight an objective is, RT computes at nearly its full pace: else more of it would be late.
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
