"""How long requests may still wait, and which skip an iteration so that others are in time (AccelGen, 4.3). Pure.

A request's *remaining time* is the time until its next token is due, less the time to compute it. For that, an
iteration counts as long as the longest recent one. The window of a best-effort job is spread evenly over its chunks and
tokens. If one of them waits too long, the next has less. A request with hardly any remaining time is *urgent*.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from alignedserve.protocol.messages import InstanceLimits
from alignedserve.scheduling.boundary import AnyDecode, DecodeRequest
from alignedserve.scheduling.token_times import Mark, TokenTimes
from alignedserve.timing.deadlines import DEMOTION_S
from alignedserve.timing.estimate import Estimate

# The pivot is the number of tokens that reaches this share of the highest rate. With this value the pivot of OPT-13B on
# an A100 is 768 tokens, as measured in the paper.
PIVOT_SHARE = 0.95
# The number of remembered iterations. An iteration is assumed to take as long as the longest of them.
NUM_REMEMBERED = 64


class Pivot:
    """The number of tokens with which a batch computes about as fast as it can, and how long that takes."""

    def __init__(self, limits: InstanceLimits, estimate: Estimate | None) -> None:
        self.num_tokens, self.seconds = limits.max_num_batched_tokens, 0.0
        if estimate is None:
            return

        def seconds(num_tokens: int) -> float:
            return estimate.iteration([(0, num_tokens)], [])

        def rate(num_tokens: int) -> float:
            return num_tokens / seconds(num_tokens)

        sizes = [
            *range(limits.block_size, self.num_tokens + 1, limits.block_size),
            self.num_tokens,
        ]
        wanted = PIVOT_SHARE * max(map(rate, sizes))
        self.num_tokens = next(size for size in sizes if rate(size) >= wanted)
        self.seconds = seconds(self.num_tokens)


@dataclass(eq=False, slots=True)
class AdmittedMark(Mark):
    # The output tokens that it had when it was admitted as urgent; -1: it was not urgent.
    urgent_at: int = -1


class RemainingTime(TokenTimes):
    """How long the requests of an instance may still wait."""

    def __init__(self, limits: InstanceLimits, estimate: Estimate | None) -> None:
        self.pivot = Pivot(limits, estimate)
        self._estimate = estimate
        self._last: deque[float] = deque([self.pivot.seconds], maxlen=NUM_REMEMBERED)
        # The assumed duration of an iteration.
        self.iteration_s = self.pivot.seconds

    def took(self, seconds: float) -> None:
        is_longest_leaving = len(self._last) == NUM_REMEMBERED and self._last[0] == self.iteration_s
        self._last.append(seconds)
        self.iteration_s = max(self._last) if is_longest_leaving else max(self.iteration_s, seconds)

    def left_s(self, request: DecodeRequest, now: float) -> float:
        """Returns the same as the base class, and for a job, the seconds until its next step is due."""
        if request.is_rt:
            return super().left_s(request, now)
        num_later = self._num_steps(request) - 1
        return float(request.deadlines.job_due_s - num_later * request.mark.step_s - now)

    def _mark(self, request: DecodeRequest, now: float) -> AdmittedMark:
        window_s = request.deadlines.job_due_s - now
        step_s = 0.0 if math.isinf(window_s) else window_s / self._num_steps(request)
        return AdmittedMark(request.num_output, now, step_s)

    def of(self, request: DecodeRequest, now: float) -> float:
        if math.isinf(left_s := self.left_s(request, now)):
            return math.inf
        if request.is_rt and not request.num_output and left_s < 0:
            left_s += DEMOTION_S
        num_chunks = self._num_chunks(request.num_pending) if request.is_rt else 1
        return left_s - num_chunks * self.iteration_s

    def in_order(self, requests: Iterable[AnyDecode], now: float) -> list[AnyDecode]:
        """Returns the requests with the least remaining time first."""
        return sorted(requests, key=lambda request: self.of(request, now))

    def is_urgent(self, request: DecodeRequest, now: float) -> bool:
        """Returns whether it must be in the next iteration, because it would be late in the one after that."""
        return self.of(request, now) <= self.iteration_s

    def admitted(self, request: DecodeRequest, now: float) -> None:
        if self.is_urgent(request, now):
            request.mark.urgent_at = request.num_output

    def came_urgent(self, request: DecodeRequest) -> bool:
        """Returns whether it was admitted as urgent and has no token since. It may no longer be urgent: if it finds its
        prefix in the cache, it has less to compute than assumed."""
        return bool(request.mark.urgent_at == request.num_output)

    def _num_steps(self, request: DecodeRequest) -> int:
        """Returns the number of its iterations. The last chunk yields the first token."""
        return self._num_chunks(request.num_pending) + request.num_left - 1

    def _num_chunks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.pivot.num_tokens)

    def in_time(
        self, decodes: Iterable[AnyDecode], now: float, num_urgent_tokens: int = 0
    ) -> tuple[list[AnyDecode], float]:
        """Returns the requests with the least remaining time, and how long the iteration may take. Takes all urgent
        ones, and as many others as the tightest objective allows beside `num_urgent_tokens` prompt tokens."""
        in_order = self.in_order(decodes, now)
        num_urgent = bisect_right(in_order, self.iteration_s, key=lambda each: self.of(each, now))
        lengths = [request.num_read for request in in_order]
        bound_s = self._bound_s(in_order, lengths[:num_urgent], now)
        if self._estimate is None or math.isinf(bound_s):
            return in_order, bound_s
        chunks = [(0, num_urgent_tokens)] if num_urgent_tokens else []
        counts = range(num_urgent + 1, len(in_order) + 1)
        num_more = bisect_right(counts, bound_s, key=self._estimate.first_decodes(chunks, lengths))
        return in_order[: num_urgent + num_more], bound_s

    def _bound_s(self, decodes: Sequence[DecodeRequest], urgent: Sequence[int], now: float) -> float:
        """Returns the tightest objective that can be met if requests of the `urgent` lengths run in any case."""
        least_s = self._estimate.iteration([], urgent) if self._estimate else 0.0
        lefts_s = (self.left_s(request, now) for request in decodes if request.is_rt)
        return min((left_s for left_s in lefts_s if left_s >= least_s), default=math.inf)
