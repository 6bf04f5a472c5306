"""The SLO scheduler of a decode instance: how real time (RT) and best effort (BE) share the time of its iterations.
Pure; see `part.py`.

An iteration is bounded by what RT's next tokens allow, and by what RT that comes may have to wait. BE joins within the
bound, beyond it on credit, and never more of it than the adaptive limit allows.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import chain

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import DecodeBoundary, DecodeRequest
from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.aligned.decode.rt_demand import DEFAULT_TBT_S, RtDemand
from alignedserve.scheduling.policies.aligned.rt_beside_be import LATE, BeCredit, num_enough
from alignedserve.timing.estimate import Estimate

# At most this share of the time that an iteration may take is planned with: the rest is for what predictions miss, and
# for a token's way out. The share is less where iterations are seen to take longer than predicted (`Estimate.overrun`).
SAFETY = 0.9
# The most credit that BE can have, as a share of the tightest recent objective.
MAX_OWED = 0.5
# An iteration takes at most these shares of the tightest recent objective, while RT is about to come and while none
# is known to come: RT should not have to wait long for an iteration that has just begun.
BEFORE_RT = 0.5
WITHOUT_RT = 1.25
# Holding an iteration back for less is not worth it.
MIN_HOLD_S = 0.0002
# BE has to run when its window leaves it less than this many iterations' time for each token.
PRESSED = 2.0
# The adaptive limit falls to one in this many.
FALL = 4

# The number of tokens computed before, and the number to compute, of each chunk.
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
        # The seconds that the iteration which was planned last may take, and the number of its BE requests.
        self._allowed_s = math.inf
        self._num_be = 0
        # How many seconds the last iteration took.
        self._last_s = 0.0

    def look(self, at: DecodeBoundary) -> None:
        """Lets BE's credit grow; called before a plan, when `RtDemand` has looked."""
        self._now_s = at.now
        requests = chain(at.running, at.arriving, at.requests, at.batch)
        is_be_there = any(not request.is_rt for request in requests)
        self._most_owed_s = MAX_OWED * min(self._demand.tightest_s, DEFAULT_TBT_S)
        self._credit.pass_time(at.now, is_be_there, self._most_owed_s)

    @property
    def is_be_owed(self) -> bool:
        """Whether BE has had nothing for so long that one request of it may be admitted before RT."""
        return self._config.be_share > 0 and self._credit.seconds >= self._most_owed_s

    def is_pressed(self, request: DecodeRequest) -> bool:
        """Whether the window of its job leaves no time for waiting."""
        allowance_s = request.deadlines.job_allowance_s(request.num_left, self._now_s)
        return allowance_s < PRESSED * self._last_s

    # ---- iterations -------------------------------------------------------------------------------------------------

    def bound_s(self, rt: Iterable[DecodeRequest]) -> float:
        """Returns the seconds that an iteration may take for the sake of the running requests, and of those which come
        unannounced or in a moment, because they wait until it ends."""
        tightest_s = self._demand.tightest_s
        bounds_s = [request.allowance_s(self._now_s) for request in rt if not request.is_lost(self._now_s)]
        bounds_s.append(
            BEFORE_RT * min(tightest_s, DEFAULT_TBT_S) if self._demand.is_near else WITHOUT_RT * tightest_s
        )
        return self._planned_share * min(bounds_s)

    def bound_of_prompts_s(self, decodes: Sequence[DecodeRequest]) -> float:
        """Returns the seconds that an iteration may take for the sake of real time that decodes, if prompts of real
        time are computed in it.

        A stream that is ahead waits, longer than for one token if need be. One that will be late without prompts as
        well holds up none that can still keep its objective, but for what it asked for between two tokens. One that
        asked for less than an iteration takes without prompts falls behind in any case, and holds up none.
        """
        now = self._now_s
        lengths = [request.num_tokens for request in decodes]
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

    def hold_s(self, rt: Sequence[DecodeRequest]) -> float:
        """Returns the seconds to wait for KV instead of beginning an iteration, if the running requests can spare
        that."""
        wanted_s = self._demand.hold_s
        if wanted_s < MIN_HOLD_S:
            return 0.0
        alone_s = self._estimate.iteration([], [request.num_tokens for request in rt]) if rt else 0.0
        slack_s = min((request.allowance_s(self._now_s) for request in rt), default=math.inf) - alone_s
        hold_s = min(wanted_s, SAFETY * slack_s)
        return hold_s if hold_s >= MIN_HOLD_S else 0.0

    def choose(
        self, rt: Sequence[DecodeRequest], be: Sequence[DecodeRequest], chunks: Chunks, bound_s: float
    ) -> list[DecodeRequest]:
        """Returns the best-effort requests which join real time, which runs in any case."""
        self._allowed_s = math.inf
        if not be or math.isinf(bound_s):
            return list(be)
        lengths = [request.num_tokens for request in rt]
        alone_s = self._estimate.iteration(chunks, lengths) if lengths or chunks else 0.0
        in_order, num_pressed = self._in_order(be)
        lengths += [request.num_tokens for request in in_order]
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

    def _is_pace_enough(self, rt: Sequence[DecodeRequest]) -> bool:
        """Whether most of the pace that best effort could have is enough: where real time comes in a moment, or some of
        it asked for no objective."""
        return self._demand.is_near or self._hurries(rt)

    def _hurries(self, rt: Sequence[DecodeRequest]) -> bool:
        return any(request.deadlines.hurries and not request.is_lost(self._now_s) for request in rt)

    def _is_sooner_better(self, rt: Sequence[DecodeRequest], be: Sequence[DecodeRequest]) -> bool:
        """Whether some of real time asked for no objective, and best effort has the time to wait."""
        return self._hurries(rt) and not any(request.deadlines.is_pressed for request in be)

    def _in_order(self, requests: Sequence[DecodeRequest]) -> tuple[list[DecodeRequest], int]:
        """Puts requests that have to run first, then those which have waited longest, then those which are done
        soonest. Returns the number of the first as well."""
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
        """Returns the number of tokens of a chunk that the iteration has time for, up to a block's end; for real time
        at least one block."""
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
    """The number of BE requests that may run beside RT: it doubles after each iteration that kept RT's time, and falls
    at once after one that did not."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.num_be = most

    def kept(self) -> None:
        self.num_be = min(2 * self.num_be, self._most)

    def missed(self, num_be: int) -> None:
        """Notes that an iteration with `num_be` BE requests took too long. At least one may always run: its cost is
        predicted before it joins."""
        self.num_be = max(num_be // FALL, 1)
