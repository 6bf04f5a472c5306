"""The SLO scheduler of a decode instance: divides the time of iterations between real time (RT) and best effort (BE).
Pure. See `part.py`.

An iteration is bounded by the due times of RT's next tokens, and by the time that newly arriving RT may have to wait.
BE joins within the bound, or beyond it on credit, up to the adaptive limit.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import chain

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.rt_demand import DEFAULT_TBT_S, RtDemand
from alignedserve.scheduling.policies.aligned.rt_beside_be import LATE, BeCredit
from alignedserve.timing.estimate import Estimate, num_enough

# The largest share of an iteration's allowed time that is planned. The rest is for prediction errors and for sending
# the tokens. The share is smaller if iterations take longer than predicted (`Estimate.overrun`).
SAFETY = 0.9
# The most BE credit, as a share of the tightest recent objective, or of DEFAULT_TBT_S if shorter. RT has the rest.
MAX_OWED = 0.5
# The longest iteration as a share of the tightest recent objective, while RT that asked for none is about to join (half
# is left for its own), and while no RT is. RT then waits for 0.6 of its objective on average. Half would cost BE much.
BEFORE_RT = 0.5
WITHOUT_RT = 1.25
# The shortest time for which holding an iteration is worth it, in seconds.
MIN_HOLD_S = 0.0002
# BE has to run when its window leaves less than this many iterations' time per token. At 2, other BE can skip half.
PRESSED = 2.0
# The divisor by which the adaptive limit falls. Two iterations within RT's time undo it, because it then doubles.
FALL = 4

# For each chunk, the number of tokens computed before and the number to compute.
Chunks = Sequence[tuple[int, int]]


class DecodeSloScheduler:
    def __init__(
        self, limits: InstanceLimits, config: SchedulingConfig, estimate: Estimate, demand: RtDemand
    ) -> None:
        self._limits = limits
        self._config = config
        self._estimate = estimate
        self._demand = demand
        self._credit = BeCredit(config.be_share)
        self._most_owed_s = 0.0
        # The time of the last boundary.
        self._now_s = 0.0
        self._limit = _AdaptiveLimit(limits.max_num_seqs)
        # The seconds that the last planned iteration may take, and the number of its BE requests.
        self._allowed_s = math.inf
        self._num_be = 0
        # The length of the last iteration, in seconds.
        self._last_s = 0.0

    def look(self, at: DecodeBoundary) -> None:
        """Lets BE credit grow. Called before each plan, after `RtDemand.look`."""
        self._now_s = at.now
        requests = chain(at.running, at.arriving, at.requests, at.batch)
        is_be_there = any(not request.is_rt for request in requests)
        self._most_owed_s = MAX_OWED * min(self._demand.tightest_s, DEFAULT_TBT_S)
        self._credit.pass_time(at.now, is_be_there, self._most_owed_s)

    @property
    def is_be_owed(self) -> bool:
        """Whether BE has its full credit, so that one BE request may be admitted before RT."""
        return self._config.be_share > 0 and self._credit.seconds >= self._most_owed_s

    def is_pressed(self, request: DecodeRequest) -> bool:
        """Returns whether the window of the request's job leaves it no time to wait."""
        allowance_s = request.deadlines.job_allowance_s(request.num_left, self._now_s)
        return allowance_s < PRESSED * self._last_s

    # ---- iterations -------------------------------------------------------------------------------------------------

    def bound_s(self, rt: Sequence[DecodeRequest]) -> float:
        """Returns the seconds that an iteration may take for the sake of running RT, and of RT that arrives during it
        and waits for its end. An objective of which RT alone takes more than LATE times as long is missed in any case.
        Such RT is treated as if it had none: BE may lengthen its iterations a little."""
        alone_s = self._estimate.iteration([], [request.num_read for request in rt] or [1])
        hurried_s = (1 + self._config.rt_stretch) * alone_s / self._planned_share
        bounds_s = [
            request.allowance_s(self._now_s) if alone_s <= LATE * request.deadlines.tbt_s else hurried_s
            for request in rt
            if not request.is_lost(self._now_s)
        ]
        tightest_s = self._demand.tightest_s
        if alone_s > LATE * tightest_s:
            bounds_s.append(hurried_s if rt else WITHOUT_RT * DEFAULT_TBT_S)
        else:
            bounds_s.append(self._before_rt_s(alone_s) if self._demand.is_near else WITHOUT_RT * tightest_s)
        return self._planned_share * min(bounds_s)

    def _before_rt_s(self, alone_s: float) -> float:
        """Returns the seconds that an iteration may take before RT that is about to join. RT waits for its end, then
        runs in one without BE, after which its token should be in time."""
        tbt_s = min(self._demand.tightest_s, DEFAULT_TBT_S)
        if not self._demand.has_objectives:
            return BEFORE_RT * tbt_s
        return tbt_s - alone_s

    def bound_of_prompts_s(self, decodes: Sequence[DecodeRequest]) -> float:
        """Returns the seconds that an iteration with RT prompts may take for the sake of decoding RT.

        A stream that is ahead bounds it by its slack, even beyond one TBT objective. A stream that will be late even
        without prompts bounds it by its TBT objective, or by LATE iterations without prompts if that is longer. A
        stream sets no bound if it is lost, or if its TBT objective is shorter than an iteration without prompts.
        """
        now = self._now_s
        lengths = [request.num_read for request in decodes]
        alone_s = self._estimate.iteration([], lengths) if decodes else 0.0
        bounds_s: list[float] = []
        for request in decodes:
            if (slack_s := request.slack_s(now)) >= alone_s:
                bounds_s.append(slack_s)
            elif request.deadlines.tbt_s >= alone_s and not request.is_lost(now):
                bounds_s.append(max(request.deadlines.tbt_s, LATE * alone_s))
        return self._planned_share * min(bounds_s, default=math.inf)

    @property
    def last_s(self) -> float:
        """The seconds that the last iteration took."""
        return self._last_s

    @property
    def _planned_share(self) -> float:
        return min(SAFETY, 1 / self._estimate.overrun)

    def hold_s(self, rt: Sequence[DecodeRequest], has_prompts: bool) -> float:
        """Returns the seconds to wait for RT's KV before an iteration begins; 0 if running RT can't spare the time, or
        that RT can wait."""
        wanted_s = self._demand.hold_s
        if wanted_s < MIN_HOLD_S:
            return 0.0
        alone_s = self._estimate.iteration([], [request.num_read for request in rt]) if rt else 0.0
        # An iteration with RT prompts may be longer than the last one.
        if rt and not has_prompts and self._can_wait(alone_s):
            return 0.0
        if rt and not self._demand.has_objectives:
            # All that run wait, in all no longer than what comes would wait for the iteration's end. A hold that is
            # shorter than the copy of its KV would be in vain.
            wanted_s = min(wanted_s, alone_s / len(rt))
            if wanted_s < self._estimate.fetch(self._demand.longest):
                return 0.0
        slack_s = min((request.allowance_s(self._now_s) for request in rt), default=math.inf) - alone_s
        hold_s = min(wanted_s, SAFETY * slack_s)
        return hold_s if hold_s >= MIN_HOLD_S else 0.0

    def choose(
        self, rt: Sequence[DecodeRequest], be: Sequence[DecodeRequest], chunks: Chunks, bound_s: float
    ) -> list[DecodeRequest]:
        """Returns the BE requests that join the iteration. All of `rt` runs in any case."""
        self._allowed_s = math.inf
        if not be or math.isinf(bound_s):
            return list(be)
        lengths = [request.num_read for request in rt]
        alone_s = self._estimate.iteration(chunks, lengths) if lengths or chunks else 0.0
        in_order, num_pressed = self._in_order(be)
        lengths += [request.num_read for request in in_order]
        predict, num_rt = self._estimate.first_decodes(chunks, lengths), len(rt)

        def seconds(num_be: int) -> float:
            return predict(num_rt + num_be)

        def num_within(bound_s: float) -> int:
            bound_s = max(bound_s, alone_s + self._credit.seconds)
            return bisect_right(range(1, len(in_order) + 1), bound_s, key=seconds)

        num_fitting = num_within(bound_s)
        enough = len(in_order)
        if num_fitting and self._is_pace_enough(rt):
            enough = num_enough(len(in_order), seconds, self._config.be_pace)
            if self._is_sooner_better(rt, be):
                enough = min(enough, num_within((1 + self._config.rt_stretch) * alone_s))
            # Windows count for more than short iterations.
            enough = max(enough, num_pressed)
        num_be = min(num_fitting, enough, self._limit.num_be)
        if num_be == 0 and not rt:
            num_be = 1
        if alone_s <= bound_s:
            self._allowed_s = bound_s / self._planned_share
        self._credit.spend(seconds(num_be) - alone_s if num_be else 0.0)
        return in_order[:num_be]

    def _can_wait(self, iteration_s: float) -> bool:
        """Returns whether RT that comes during an iteration can wait for its end, and run in the next one. RT without
        an objective wants to run at once."""
        demand = self._demand
        return demand.has_objectives and 2 * max(iteration_s, self._last_s) <= SAFETY * demand.tightest_s

    def _is_pace_enough(self, rt: Sequence[DecodeRequest]) -> bool:
        """Returns whether BE gets only its sufficient pace: RT that is about to join, or runs, hurries."""
        demand = self._demand
        return (demand.is_near and not demand.has_objectives) or self._hurries(rt)

    def _hurries(self, rt: Sequence[DecodeRequest]) -> bool:
        return any(request.deadlines.hurries and not request.is_lost(self._now_s) for request in rt)

    def _is_sooner_better(self, rt: Sequence[DecodeRequest], be: Sequence[DecodeRequest]) -> bool:
        """Returns whether running RT hurries, and no BE job would be late."""
        return self._hurries(rt) and not any(request.deadlines.is_pressed for request in be)

    def _in_order(self, requests: Sequence[DecodeRequest]) -> tuple[list[DecodeRequest], int]:
        """Returns the requests sorted, pressed ones first, then by longest wait, then by fewest tokens left. Returns
        the number of pressed ones as well."""
        now, pressed_s = self._now_s, PRESSED * self._last_s
        places, num_pressed = [], 0
        for number, request in enumerate(requests):
            num_left, deadlines, allowance_s = request.num_left, request.deadlines, math.inf
            if deadlines.job_due_s < math.inf and (
                (job_allowance_s := deadlines.job_allowance_s(num_left, now)) < pressed_s
            ):
                allowance_s = job_allowance_s
                num_pressed += 1
            places.append((allowance_s, request.last_run, num_left, number))
        places.sort()
        return [requests[number] for *_, number in places], num_pressed

    def most_tokens(
        self, request: DecodeRequest, most: int, chunks: Chunks, lengths: Sequence[int], bound_s: float
    ) -> int:
        """Returns the number of tokens of a chunk that fit into the iteration's time, up to a block's end. Returns at
        least one block for RT."""
        before, block_size = request.num_cached, self._limits.block_size
        first = block_size - before % block_size
        ends: list[int] = [*range(first, most, block_size), most]
        predict = self._estimate.one_more_chunk(chunks, lengths)

        def seconds(count: int) -> float:
            return predict(before, count)

        fitting = bisect_right(ends, bound_s, key=seconds)
        if fitting:
            return ends[fitting - 1]
        return ends[0] if request.is_rt or not (lengths or chunks) else 0

    def chunk_bound_s(
        self,
        first: DecodeRequest,
        rt: Sequence[DecodeRequest],
        chunks: Chunks,
        lengths: Sequence[int],
        bound_s: float,
    ) -> float:
        """Returns the seconds that the iteration may take with chunks of BE, of which the first is `first`."""
        block_size = self._limits.block_size
        most = max(self._limits.max_num_batched_tokens // block_size, 1)
        if math.isinf(bound_s):
            return bound_s

        predict = self._estimate.one_more_chunk(chunks, lengths)

        def seconds(num_blocks: int) -> float:
            return predict(first.num_cached, num_blocks * block_size)

        if self._is_pace_enough(rt):
            bound_s = min(bound_s, seconds(num_enough(most, seconds, self._config.be_pace)))
        alone_s = self._estimate.iteration(chunks, lengths) if chunks or lengths else 0.0
        return max(bound_s, alone_s + self._credit.seconds)

    def spent_on_chunks(self, taken: Chunks, chunks: Chunks, lengths: Sequence[int]) -> None:
        alone_s = self._estimate.iteration(chunks, lengths) if chunks or lengths else 0.0
        if taken:
            self._credit.spend(self._estimate.iteration([*chunks, *taken], lengths) - alone_s)

    def planned(self, num_be: int) -> None:
        self._num_be = num_be

    def took(self, seconds: float) -> None:
        self._last_s = seconds
        if self._num_be and not math.isinf(self._allowed_s):
            if seconds > self._allowed_s:
                self._limit.missed(self._num_be)
            else:
                self._limit.kept()


class _AdaptiveLimit:
    """The number of BE requests that may run beside RT. It doubles after an iteration within RT's time, and falls after
    a longer one."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_be = most

    def kept(self) -> None:
        self.num_be = min(2 * self.num_be, self._most)

    def missed(self, num_be: int) -> None:
        """Lowers the limit after an iteration with `num_be` BE requests took too long. At least one may always run,
        because its cost is predicted before it joins."""
        self.num_be = max(num_be // FALL, 1)
