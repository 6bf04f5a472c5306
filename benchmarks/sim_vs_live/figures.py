"""The compared figures, and the observer that measures them: it sees the router's events, which are the same live and
simulated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from statistics import median

from alignedserve.protocol.messages import DecodeReport, PrefillReport, Request, Submit, Tokens
from alignedserve.router.events import Event, Received, Send
from alignedserve.sim.report import quantiles
from alignedserve.sim.trace import Arrival, Lengths
from alignedserve.types import RequestKey

# Larger relative errors are marked.
MOST_OFF = 0.15


@dataclass(frozen=True)
class Figures:
    """Latencies of real time in seconds, and output tokens per second of all requests."""

    # No p99 for TTFT: among 200 requests it would be the second longest, and among 30 the longest.
    ttft_p50_s: float
    ttft_p90_s: float
    tbt_p50_s: float
    tbt_p99_s: float
    tokens_per_s: float

    def ratios(self, simulated: Figures) -> dict[str, float]:
        """Returns the ratios of simulated to live."""
        return {name: value / getattr(self, name) for name, value in asdict(simulated).items()}


NAMES = [each.name for each in fields(Figures)]


@dataclass(frozen=True)
class Side:
    """One side's results for the counted requests."""

    figures: Figures
    iterations: dict[str, float]
    # Seconds to the first and to the last token of each request, in order of arrival.
    first_s: list[float]
    last_s: list[float]

    def paired(self, simulated: Side) -> dict[str, float]:
        """Returns the median relative error of the simulated times per request. Figures over all requests can be right
        even if those of single requests are not."""
        return {
            "first_token": _median_off(self.first_s, simulated.first_s),
            "last_token": _median_off(self.last_s, simulated.last_s),
        }


def _median_off(live_s: Sequence[float], simulated_s: Sequence[float]) -> float:
    return median(abs(theirs / ours - 1) for ours, theirs in zip(live_s, simulated_s, strict=True))


def is_off(ratio: float) -> bool:
    return abs(ratio - 1) > MOST_OFF


def figures_of(
    waits_s: Sequence[float], times_s: Sequence[Sequence[float]], num_tokens: int, span_s: float
) -> Figures:
    """Returns the figures. `waits_s` are the seconds to first tokens, `times_s` the times of each request's tokens."""
    ttft_s = quantiles(waits_s)
    tbt_s = quantiles([later - sooner for each in times_s for sooner, later in pairwise(each)])
    return Figures(ttft_s.p50, ttft_s.p90, tbt_s.p50, tbt_s.p99, num_tokens / span_s)


class Door:
    """Records when requests arrive at the router, and when each of their tokens leaves it."""

    def __init__(self) -> None:
        self.arrived_s: dict[RequestKey, float] = {}
        self.requests: dict[RequestKey, Request] = {}
        self.times_s: defaultdict[RequestKey, list[float]] = defaultdict(list)
        # (time, report) of each report of an instance that decodes, and of each of a prefill instance.
        self.reports: list[tuple[float, DecodeReport]] = []
        self.prefill_reports: list[tuple[float, PrefillReport]] = []

    def __call__(self, now: float, event: Event, sends: Sequence[Send]) -> None:
        match event:
            case Received(_, Submit(request=request)):
                self.arrived_s.setdefault(request.key, now)
                self.requests[request.key] = request
            case Received(_, DecodeReport() as report):
                self.reports.append((now, report))
            case Received(_, PrefillReport() as report):
                self.prefill_reports.append((now, report))
            case _:
                pass
        for send in sends:
            if isinstance(send.message, Tokens):
                for news in send.message.news:
                    self.times_s[news.key] += [now] * len(news.tokens)

    def messages_s(self) -> list[float]:
        """Returns, for each request that ran alone, the router's wait for its first token beyond the iterations. It
        consists of two messages: the order and the report."""
        in_order = sorted(self.arrived_s, key=self.arrived_s.__getitem__)
        found = []
        for before, key, after in zip([None, *in_order], in_order, [*in_order[1:], None], strict=False):
            arrived_s, first_s = self.arrived_s[key], self.times_s[key][0]
            is_after = before is None or self.times_s[before][-1] < arrived_s
            if is_after and (after is None or first_s < self.arrived_s[after]):
                reports: list[tuple[float, DecodeReport | PrefillReport]]
                reports = [*self.reports, *self.prefill_reports]
                between = [each for now, each in reports if arrived_s < now <= first_s]
                found.append(
                    first_s - arrived_s - sum(each.duration_s for each in between if each.num_computed)
                )
        return found

    def last_to_come(self, count: int) -> list[RequestKey]:
        return sorted(self.arrived_s, key=self.arrived_s.__getitem__)[-count:]

    def arrivals(self, keys: Sequence[RequestKey]) -> list[Arrival]:
        """Returns these requests as arrivals, with the first one at 0."""
        begin_s = min(self.arrived_s[key] for key in keys)
        return [self._arrival(self.requests[key], self.arrived_s[key] - begin_s) for key in keys]

    @staticmethod
    def _arrival(request: Request, time_s: float) -> Arrival:
        lengths = Lengths(len(request.prompt), request.params.max_tokens or 1)
        return Arrival(time_s, lengths, request.tier, tbt_s=request.tbt_s)

    def side(self, count: int) -> Side:
        """Returns the results of the last `count` requests."""
        keys = self.last_to_come(count)
        times_s = [(self.arrived_s[key], self.times_s[key]) for key in keys]
        return Side(
            self.figures(keys),
            self.iterations(min(self.arrived_s[key] for key in keys)),
            [each[0] - arrived_s for arrived_s, each in times_s],
            [each[-1] - arrived_s for arrived_s, each in times_s],
        )

    def figures(self, keys: Sequence[RequestKey]) -> Figures:
        rt = [key for key in keys if self.requests[key].tier == "rt"]
        num_tokens = sum(len(self.times_s[key]) for key in keys)
        span_s = max(self.times_s[key][-1] for key in keys) - min(self.arrived_s[key] for key in keys)
        waits_s = [self.times_s[key][0] - self.arrived_s[key] for key in rt]
        return figures_of(waits_s, [self.times_s[key] for key in rt], num_tokens, span_s)

    def iterations(self, begin_s: float) -> dict[str, float]:
        """Returns counts and means of the iterations with tokens since then."""
        found = [each for now, each in self.reports if now >= begin_s and each.num_computed]
        return {
            "num_iterations": len(found),
            "iteration_s": sum(each.duration_s for each in found) / len(found),
            "tokens": sum(len(each.news) for each in found) / len(found),
            "computed": sum(each.num_computed for each in found) / len(found),
            "num_evicted": sum(len(each.evicted) for each in found),
        }
