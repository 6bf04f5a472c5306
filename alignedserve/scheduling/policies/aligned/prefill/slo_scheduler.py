"""The SLO scheduler of a prefill instance: divides iterations between real time (RT) and best effort (BE), chooses the
chunks, and sets how many blocks BE leaves free. Pure. See `part.py`."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import PrefillBoundary, PrefillRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.rt_beside_be import (
    ENOUGH,
    BeCredit,
    headroom_blocks,
    nums_for_pace,
)
from alignedserve.timing.cost import ChunkCosts
from alignedserve.timing.deadlines import UNSTATED_TTFT_S, due_s
from alignedserve.timing.estimate import Estimate
from alignedserve.timing.sliding import SlidingMaximum, SlidingMinimum
from alignedserve.types import RequestKey

# The least share of its pace that BE has. Shorter chunks would keep the instance busy for more time than they save RT.
LEAST = 0.6
# Seconds after which the chunk sizes for these shares are computed again. They change with the measured cost of
# iterations outside the engine.
CHOOSE_S = 1.0
# The share by which BE may lengthen an iteration with RT that has no time to spare. RT keeps ENOUGH of its pace.
MAX_STRETCH = 0.05
# The share of the time until RT is due that it may spend in iterations with BE, if none has passed before. Halving or
# doubling it changes less than 0.1 % in four scenarios (benchmarks.arena.sweep).
SPARE = 0.25
# The most places of prompts in pieces, before those of prompts that are gone are dropped.
MOST_BEGUN = 16

# An owner and whether it is RT.
_Owner = tuple[str, bool]


def _owner(request: PrefillRequest) -> _Owner:
    return request.owner, request.is_rt


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
        # Has a value if recent RT hurries: its first token is wanted as soon as possible.
        self._hurried = SlidingMinimum()
        # The tightest recent TTFT objective, and the share of it that an iteration of BE may take, in seconds. Whether
        # RT was seen within the sliding window. The number of blocks that BE leaves free.
        self._tightest_s = 0.0
        self._bound_s = 0.0
        self._is_rt_known = False
        self.num_headroom_blocks = 0
        # The prompt of each owner and class that is in pieces.
        self._begun: dict[_Owner, RequestKey] = {}

    def look(self, at: PrefillBoundary) -> None:
        """Updates the sliding windows, the credit and the headroom from all prompts. Called before each plan."""
        is_be_there, now = False, at.now
        for request in chain(at.started, at.waiting):
            is_be_there |= not request.is_rt and request.num_pending > 0
            if request.is_rt and request.num_pending:
                ttft_s = request.ttft_s
                self._objectives.add(UNSTATED_TTFT_S if ttft_s is None else ttft_s, now)
                self._lengths.add(request.num_tokens, now)
                if ttft_s is None or request.deadlines.hurries:
                    self._hurried.add(0.0, now)
        self._tightest_s = self._objectives.value(UNSTATED_TTFT_S, now)
        self._bound_s = self._config.chunk_share * self._tightest_s
        self._is_rt_known = self._lengths.value(0, now) > 0
        if self._is_rt_known and now - self._chosen_s >= CHOOSE_S:
            self._num_least, self._num_enough = nums_for_pace(
                self._limits, lambda count: self._estimate.iteration([(0, count)], []), LEAST, ENOUGH
            )
            self._chosen_s = now
        self._credit.pass_time(now, is_be_there, self._max_credit_s)
        longest = self._lengths.value(0, now)
        self.num_headroom_blocks = headroom_blocks(self._limits, self._config.rt_headroom, longest)

    def _alone_s(self, now: float) -> float:
        """Returns the seconds that an iteration of BE without RT may take, credit included."""
        if not self._is_rt_known:
            return self._bound_s
        longest_s = max(self._bound_s, self._least_s)
        if self._hurried.value(math.inf, now) < math.inf:
            longest_s = min(longest_s, max(self._enough_s, self._credit.seconds))
        return longest_s

    @property
    def _least_s(self) -> float:
        return self._estimate.iteration([(0, self._num_least)], [])

    @property
    def _enough_s(self) -> float:
        return self._estimate.iteration([(0, self._num_enough)], []) if self._num_enough else 0.0

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
        self, requests: Sequence[PrefillRequest], at: PrefillBoundary
    ) -> list[tuple[PrefillRequest, int]]:
        """Returns the chunks of these requests, which are in order, in tokens. BE gets what RT leaves, or its credit
        before RT if that is more."""
        rt = [request for request in requests if request.is_rt]
        be = [request for request in requests if not request.is_rt]
        chosen = self._cut_rt_first(rt, be, at)
        be_s = chosen.seconds - chosen.seconds_without(be)
        if be and (rt or at.rt_behind_copies) and be_s < self._credit.seconds:
            other = self._cut_credit_first(rt, be, at)
            chosen = max(chosen, other, key=lambda cut: cut.num_tokens(be))
            be_s = chosen.seconds - chosen.seconds_without(be)
        self._begun |= chosen.in_pieces
        if len(self._begun) > MOST_BEGUN:
            here = {request.key for request in chain(at.started, at.waiting)}
            self._begun = {owner: key for owner, key in self._begun.items() if key in here}
        self._credit.spend(be_s)
        return [(request, chosen.chunks[request.key][1]) for request in chosen.requests]

    def _cut_rt_first(
        self, rt: Sequence[PrefillRequest], be: Sequence[PrefillRequest], at: PrefillBoundary
    ) -> Cut:
        cut = self._begin(at)
        self._cut_rt(cut, rt)
        if rt:
            self._cut_class(cut, be, self._beside_s(cut, rt, at.now), has_floor=False)
        elif at.rt_behind_copies:
            # RT continues at the iteration's end. It may be no longer than one of RT, and is not worth it if it is
            # very short.
            spare_s = _spare_s(at.rt_behind_copies, at.now)
            bound_s = min(self._alone_s(at.now), self._enough_s, spare_s)
            self._cut_class(cut, be, bound_s if bound_s >= self._least_s else 0.0, has_floor=False)
        else:
            self._cut_class(cut, be, self._alone_s(at.now), has_floor=True)
        return cut

    def _cut_credit_first(
        self, rt: Sequence[PrefillRequest], be: Sequence[PrefillRequest], at: PrefillBoundary
    ) -> Cut:
        cut = self._begin(at)
        # The fixed cost of the iteration counts as RT's.
        least_s = self._estimate.iteration([(rt[0].num_computed, 1)], []) if rt else 0.0
        self._cut_class(cut, be, least_s + self._credit.seconds, has_floor=False)
        self._cut_rt(cut, rt)
        return cut

    def _begin(self, at: PrefillBoundary) -> Cut:
        return Cut(self._estimate, self._limits.block_size, at.num_tokens_left)

    def _cut_rt(self, cut: Cut, rt: Sequence[PrefillRequest]) -> None:
        # RT computes at nearly its full pace, however tight an objective is. A slower pace would make more of it late.
        self._cut_class(cut, rt, max(self._tightest_s, self._enough_s), has_floor=True)

    def _beside_s(self, cut: Cut, rt: Sequence[PrefillRequest], now: float) -> float:
        """Returns the seconds that an iteration with RT may take with BE in it.

        That is as long as one of BE alone, if all RT prompts are still computed within `_spare_s`. The rest of the time
        until they are due is for prediction errors, for RT that is to come, and for what follows the prompt.
        """
        alone_s = cut.seconds
        all_s = self._estimate.iteration([(each.num_computed, each.num_pending) for each in rt], [])
        longest_s = min(self._alone_s(now), alone_s / all_s * _spare_s(rt, now))
        return max(alone_s * (1 + MAX_STRETCH), longest_s)

    def _cut_class(
        self, cut: Cut, requests: Sequence[PrefillRequest], bound_s: float, has_floor: bool
    ) -> None:
        if not requests:
            return
        begun = {_owner(each): each for each in requests if self._begun.get(_owner(each)) == each.key}
        if in_pieces := cut.add(requests, begun, bound_s, has_floor):
            cut.in_pieces[_owner(in_pieces)] = in_pieces.key


def _spare_s(requests: Iterable[PrefillRequest], now: float) -> float:
    """Returns the seconds that BE may keep these RT requests waiting. It is 0 if one is late or has no objective."""
    return max(min(_spare_of(request, now) for request in requests), 0.0)


def _spare_of(request: PrefillRequest, now: float) -> float:
    """Returns SPARE of the time until the request is due, minus the time before it was first planned here. That was
    mostly in the router's queue, and BE would delay all RT in there."""
    due = due_s(request.deadlines, request.num_output)
    if due == math.inf:
        return 0.0
    objective_s = None if request.num_output else request.ttft_s
    passed_s = 0.0 if objective_s is None else max(objective_s - (due - request.since_s), 0.0)
    return SPARE * (due - now) - passed_s


# ---- chunks of an iteration ------------------------------------------------------------------------------------------

# Chunks end on block boundaries.
#
# The iteration's predicted time is bounded (AccelGen's token budget, found by bisection on the estimate), so that the
# next request to arrive does not wait longer than that. Attention costs more at later positions, so later chunks of a
# prompt are shorter.
#
# Within a class, prompts are taken in order. The first that does not fit whole gets what is left. At most one prompt of
# an owner and a class is in pieces: while it is unfinished, it gets what is left, and no other one of its owner is cut.


# With a floor, the bound is at least this multiple of the time that the first block takes. A bound that a single block
# breaks can't be kept anyway.
FLOOR = 1.25


@dataclass
class Cut:
    """The chunks of one iteration while they are chosen."""

    estimate: Estimate
    block_size: int
    num_left: int
    # The number of tokens computed before, and the number to compute, of each chunk.
    chunks: dict[RequestKey, tuple[int, int]] = field(default_factory=dict)
    requests: list[PrefillRequest] = field(default_factory=list)
    # The prompts that this leaves in pieces, at most one of a class.
    in_pieces: dict[_Owner, RequestKey] = field(default_factory=dict)
    _costs: ChunkCosts = field(init=False)

    def __post_init__(self) -> None:
        self._costs = self.estimate.chunks_together()

    @property
    def seconds(self) -> float:
        return self.estimate.iteration([*self.chunks.values()], []) if self.chunks else 0.0

    def num_tokens(self, requests: Iterable[PrefillRequest]) -> int:
        """Returns the number of tokens of these requests."""
        return sum(self.chunks[each.key][1] for each in requests if each.key in self.chunks)

    def seconds_without(self, requests: Iterable[PrefillRequest]) -> float:
        left = self.chunks.keys() - {request.key for request in requests}
        return self.estimate.iteration([self.chunks[key] for key in left], []) if left else 0.0

    def add(
        self,
        requests: Sequence[PrefillRequest],
        begun: Mapping[_Owner, PrefillRequest],
        bound_s: float,
        has_floor: bool,
    ) -> PrefillRequest | None:
        """Adds chunks of these requests, which are in order and of one class. Returns the request that it has cut, or
        None if it has cut none.

        `begun` has each owner's request that is in pieces already. It goes before others of its owner that do not fit
        whole. With a floor, the first request gets at least one block, or all tokens that are left of the budget.
        """
        queue = [request for request in requests if request.key not in self.chunks]
        while queue and self.num_left:
            request, count = queue[0], self._most(queue[0], bound_s, has_floor)
            in_pieces = begun.get(_owner(request))
            if count < request.num_pending and in_pieces and in_pieces in queue:
                request, count = in_pieces, self._most(in_pieces, bound_s, has_floor)
            if count:
                self._take(request, count)
            if count < request.num_pending:
                return request if count else None
            queue.remove(request)
            has_floor = False
        return None

    def _take(self, request: PrefillRequest, count: int) -> None:
        self.chunks[request.key] = (request.num_computed, count)
        self.requests.append(request)
        self._costs.add(request.num_computed, count)
        self.num_left -= count

    def _most(self, request: PrefillRequest, bound_s: float, has_floor: bool) -> int:
        """Returns the number of the request's tokens that fit, up to a block boundary or the prompt's end."""
        before, most = request.num_computed, min(request.num_pending, self.num_left)
        one_block = min(self.block_size - before % self.block_size, most)
        if has_floor:
            bound_s = max(bound_s, FLOOR * self._seconds_with(before, one_block))
        if most == request.num_pending and self._seconds_with(before, most) <= bound_s:
            return most
        low, high = before // self.block_size, (before + most) // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self._seconds_with(before, middle * self.block_size - before) <= bound_s:
                low = middle
            else:
                high = middle - 1
        count = max(low * self.block_size - before, 0)
        # With a floor, `count` is 0 only if fewer tokens are left than the block needs.
        return count or (one_block if has_floor and not self.chunks else 0)

    def _seconds_with(self, before: int, count: int) -> float:
        return self.estimate.corrected(self._costs.seconds_with(before, count))
