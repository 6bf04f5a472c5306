"""The results of a simulation: latencies as clients see them, SLO attainment, throughput, and how even the batches
were."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import fmean

from alignedserve.sim.gateway import Stream
from alignedserve.sim.lifetime import DecodeIteration, Lifetimes


@dataclass(frozen=True)
class Objectives:
    """Objectives in seconds; infinite: none."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1


@dataclass(frozen=True)
class Latency:
    """A request's latency, as its client sees it."""

    ttft_s: float
    # Mean seconds between two tokens; 0 if there is only one token.
    tpot_s: float
    jct_s: float

    def meets(self, slo: Objectives) -> bool:
        return self.ttft_s <= slo.ttft_s and self.tpot_s <= slo.tpot_s


@dataclass(frozen=True)
class Quantiles:
    mean: float
    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Report:
    num_requests: int
    num_complete: int
    # The share of all requests that are complete and within the SLO.
    attainment: float
    ttft_s: Quantiles
    tpot_s: Quantiles
    jct_s: Quantiles
    # Output tokens per second in which decode instances compute.
    decode_tokens_per_busy_s: float
    # The same up to the last admission, because batches only shrink after it.
    loaded_tokens_per_busy_s: float
    # Output tokens per second from the first arrival to the last end.
    tokens_per_s: float
    # This mean and the next two weight each iteration by its duration.
    mean_iteration_s: float
    mean_batch: float
    max_over_mean_length: float
    # The share of iterations that mix batches: see DecodeReport.
    mixed: float
    num_evictions: int
    # How often a request left without its KV, which was computed again.
    num_drops: int

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def latency_of(stream: Stream) -> Latency:
    arrival_s, times_s = stream.request.arrival_s, stream.times_s
    num_gaps = len(times_s) - 1
    return Latency(
        ttft_s=times_s[0] - arrival_s,
        tpot_s=(times_s[-1] - times_s[0]) / num_gaps if num_gaps else 0.0,
        jct_s=times_s[-1] - arrival_s,
    )


def attainment(streams: Sequence[Stream], slo: Objectives) -> float:
    return sum(stream.is_complete and latency_of(stream).meets(slo) for stream in streams) / len(streams)


def quantiles(values: Sequence[float]) -> Quantiles:
    """Returns nearest-rank quantiles."""
    ordered = sorted(values)

    def at(percent: int) -> float:
        return ordered[-(-len(ordered) * percent // 100) - 1]

    return Quantiles(fmean(ordered), at(50), at(90), at(99))


def make_report(streams: Sequence[Stream], lifetimes: Lifetimes, slo: Objectives) -> Report:
    complete = [stream for stream in streams if stream.is_complete]
    if not complete:
        raise ValueError(f"{len(streams)} requests, none of them complete: nothing to report")
    latencies = [latency_of(stream) for stream in complete]
    iterations = [each for all_of_one in lifetimes.iterations.values() for each in all_of_one]
    busy_s = sum(each.duration_s for each in iterations)
    span_s = max(stream.ended_s for stream in streams) - min(stream.request.arrival_s for stream in streams)

    def mean_over_time(values: Sequence[float]) -> float:
        if not busy_s:
            return 0.0
        return sum(value * each.duration_s for value, each in zip(values, iterations, strict=True)) / busy_s

    last_admission_s = max(lifetimes.times("admitted"), default=0.0)
    loaded = [each for each in iterations if each.end_s <= last_admission_s]

    return Report(
        num_requests=len(streams),
        num_complete=len(complete),
        attainment=attainment(streams, slo),
        ttft_s=quantiles([each.ttft_s for each in latencies]),
        tpot_s=quantiles([each.tpot_s for each in latencies]),
        jct_s=quantiles([each.jct_s for each in latencies]),
        decode_tokens_per_busy_s=_tokens_per_busy_s(iterations),
        loaded_tokens_per_busy_s=_tokens_per_busy_s(loaded),
        tokens_per_s=sum(len(stream.tokens) for stream in streams) / span_s,
        mean_iteration_s=mean_over_time([each.duration_s for each in iterations]),
        mean_batch=mean_over_time([each.num_tokens for each in iterations]),
        max_over_mean_length=mean_over_time([each.max_length / each.mean_length for each in iterations]),
        mixed=sum(each.is_mixed for each in iterations) / max(len(iterations), 1),
        num_evictions=lifetimes.count("evicted"),
        num_drops=lifetimes.count("dropped"),
    )


def _tokens_per_busy_s(iterations: Sequence[DecodeIteration]) -> float:
    busy_s = sum(each.duration_s for each in iterations)
    return sum(each.num_tokens for each in iterations) / busy_s if busy_s else 0.0
