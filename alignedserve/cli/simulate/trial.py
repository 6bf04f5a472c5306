"""One workload on one island, until all of it has ended, and its results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from alignedserve.cli.simulate.backlog import Backlog
from alignedserve.cli.simulate.load import LoadObserver
from alignedserve.cli.simulate.mixture import Mixture, mixture
from alignedserve.sim.gateway import Stream
from alignedserve.sim.host_links import LinkUse
from alignedserve.sim.lifetime import DecodeIteration, Lifetimes
from alignedserve.sim.pauses import Pauses
from alignedserve.sim.report import Quantiles, quantiles
from alignedserve.sim.scenario import STUCK_S, Ran, Scenario
from alignedserve.sim.trace import Arrival, Lengths

_REFUSED = ("full", "owner_full", "too_long", "slo", "error")
# AlignedServe's paper counts the iterations that are scheduled within these seconds.
SOON_S = 0.005


@dataclass(frozen=True)
class Workload:
    traffic: Sequence[Arrival]
    # Best-effort requests that are always there beside the traffic, from `warmup_s` seconds before it.
    backlog_size: int = 0
    backlog: Sequence[Lengths] = ()
    warmup_s: float = 0.0

    def fitting(self, scenario: Scenario) -> Workload:
        """Returns the workload without requests that are too long for the model. Raises ValueError if none is left."""
        traffic = [each for each in self.traffic if scenario.fits(each.lengths)]
        backlog = [each for each in self.backlog if scenario.fits(each)]
        if not traffic or (self.backlog_size and not backlog):
            raise ValueError(f"max_model_len={scenario.max_model_len}: every request is longer")
        return replace(self, traffic=traffic, backlog=backlog)


@dataclass(frozen=True)
class TrialOutcome:
    mixture: Mixture
    # Seconds from the arrival to the last token, of complete best-effort requests.
    be_answered_s: Quantiles | None
    be_ttft_s: Quantiles | None
    num_be_complete: int
    # Requests of the traffic that were refused or failed.
    num_refused: int
    # Requests of the traffic that were still open an hour after the last arrival.
    num_open: int
    # The share of the window in which prefill instances computed. For decode instances, see the mixture.
    prefill_busy: float
    # Mean number of requests in an iteration of a decode instance, weighted by the iteration's duration.
    mean_batch: float
    # The number of candidate batches that ran.
    num_batches: int
    # The share of iterations that mixed batches, or a batch and requests of none; None: no batch ran.
    mixed: float | None
    # The share of iterations that were scheduled within SOON_S seconds of the one before, copies included.
    scheduled_soon: float
    # The largest share of the pool that was in use.
    pool_peak: float
    window_s: float
    # The use of each link until the last request of the traffic had ended.
    links: list[LinkUse]
    # The share of complete requests' prompt tokens with KV that was there already; None: no prefixes are shared.
    reused: float | None = None


class Trial:
    def __init__(self, scenario: Scenario, workload: Workload, told: Callable[[], None]) -> None:
        """`told`: called for each request of the traffic that has ended."""
        self._told = told
        self._begin_s = workload.warmup_s if workload.backlog_size else 0.0
        self._scenario = scenario
        self._island = scenario.island()
        self._load = LoadObserver(self._island, self._begin_s)
        self._lifetimes, self._pauses = Lifetimes(), Pauses(scenario.span)
        self._island.router.observers += [self._lifetimes, self._pauses, self._load]
        traffic = [replace(each, time_s=each.time_s + self._begin_s) for each in workload.traffic]
        self._requests = scenario.requests(traffic)
        self._island.submit(self._requests)
        self._num_left = len(self._requests)
        gateway = self._island.gateways[0]
        gateway.listeners.append(self._ended)
        if workload.backlog_size:
            backlog = Backlog(scenario, gateway, workload.backlog, first_key=len(self._requests) + 1)
            backlog.start(workload.backlog_size)
            self._island.world.clock.at(self._begin_s, partial(self._island.host.count_anew, self._begin_s))
        self._has_backlog = workload.backlog_size > 0

    def run(self) -> TrialOutcome:
        island = self._island
        island.start()
        limit_s = self._requests[-1].arrival_s + STUCK_S
        is_done = island.world.clock.run_while(lambda: self._num_left > 0, limit_s)
        links = island.host.use(island.now)
        if is_done and not self._has_backlog:
            island.settle()
            island.check_idle()
        return self._outcome(links)

    def _ended(self, stream: Stream) -> None:
        if self._is_traffic(stream):
            self._num_left -= 1
            self._told()

    def _is_traffic(self, stream: Stream) -> bool:
        return stream.request.key <= len(self._requests)

    def _outcome(self, links: list[LinkUse]) -> TrialOutcome:
        island = self._island
        ran = Ran(self._scenario, island.streams, self._lifetimes, self._pauses, island.world.computed)
        traffic = [stream for stream in ran.streams if self._is_traffic(stream)]
        end_s = self._end_s(traffic)
        be = [each for each in ran.streams if each.request.tier == "be" and each.ended_s > self._begin_s]
        complete = [stream for stream in be if stream.is_complete]
        window_s = end_s - self._begin_s
        all_of_all = self._iterations()
        iterations = [each for of_one in all_of_all for each in of_one]
        return TrialOutcome(
            mixture=mixture(ran, self._begin_s, end_s),
            be_answered_s=_quantiles([each.ended_s - each.request.arrival_s for each in complete]),
            be_ttft_s=_quantiles([each.times_s[0] - each.request.arrival_s for each in complete]),
            num_be_complete=len(complete),
            num_refused=sum(stream.outcome in _REFUSED for stream in traffic),
            num_open=self._num_left,
            prefill_busy=self._load.computing_s["prefill"] / (window_s * max(self._scenario.num_prefill, 1)),
            mean_batch=_mean_batch(iterations),
            num_batches=sum(len({each.batch for each in of_one if each.batch}) for of_one in all_of_all),
            mixed=_share_mixed(iterations),
            scheduled_soon=_share_soon(iterations),
            pool_peak=self._load.most_pool_blocks / island.pool.core.num_blocks,
            window_s=window_s,
            links=links,
            reused=self._share_reused(traffic) if self._scenario.enable_prefix_caching else None,
        )

    @staticmethod
    def _share_reused(streams: Sequence[Stream]) -> float:
        complete = [stream for stream in streams if stream.is_complete]
        num_tokens = sum(len(stream.request.prompt) for stream in complete)
        return sum(stream.num_reused for stream in complete) / num_tokens if num_tokens else 0.0

    def _end_s(self, traffic: Sequence[Stream]) -> float:
        """Returns when the last real-time request ended, because after that best effort has nothing beside it. Without
        real time, returns when all had ended."""
        rt = [stream for stream in traffic if stream.request.tier == "rt"]
        if self._num_left:
            return self._island.now
        return max(stream.ended_s for stream in rt or traffic)

    def _iterations(self) -> list[list[DecodeIteration]]:
        """Returns the iterations of each decode instance, without the warm-up."""
        all_of_all = self._lifetimes.iterations.values()
        return [[each for each in of_one if each.end_s > self._begin_s] for of_one in all_of_all]


def _mean_batch(iterations: Sequence[DecodeIteration]) -> float:
    busy_s = sum(each.duration_s for each in iterations)
    return sum(each.num_tokens * each.duration_s for each in iterations) / busy_s if busy_s else 0.0


def _share_soon(iterations: Sequence[DecodeIteration]) -> float:
    times_s = [each.scheduling_s for each in iterations if each.scheduling_s is not None]
    return sum(time_s <= SOON_S for time_s in times_s) / len(times_s) if times_s else 1.0


def _share_mixed(iterations: Sequence[DecodeIteration]) -> float | None:
    mixed = [each.is_mixed for each in iterations if each.batch]
    return sum(mixed) / len(mixed) if mixed else None


def _quantiles(values: Sequence[float]) -> Quantiles | None:
    return quantiles(values) if values else None
