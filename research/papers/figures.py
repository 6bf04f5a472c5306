"""The papers' metrics, computed from a simulation's streams and iterations. Pure; seconds and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

from alignedserve.sim.gateway import Stream
from alignedserve.sim.lifetime import DecodeIteration, Lifetimes
from alignedserve.sim.model import num_output_tokens
from alignedserve.sim.report import latency_of


def normalized_latency_s(streams: Sequence[Stream], now: float, max_model_len: int) -> float:
    """Returns the mean over requests of the seconds to a request's end per token. An unfinished request counts with the
    seconds so far."""
    return fmean(
        ((stream.times_s[-1] if stream.is_complete else now) - stream.request.arrival_s)
        / num_output_tokens(stream.request, max_model_len)
        for stream in streams
    )


def ttft_s(stream: Stream, now: float) -> float:
    """Returns the seconds so far if it has no token yet."""
    return (stream.times_s[0] if stream.times_s else now) - stream.request.arrival_s


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the value at the nearest rank."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * share // 1) - 1)]


def meets(stream: Stream, ttft: float, p99_tbt: float) -> bool:
    """Applies Apt-Serve's and DistServe's criterion: the first token, and the p99 of the gaps."""
    if not stream.is_complete or ttft_s(stream, 0.0) > ttft:
        return False
    gaps = [later - sooner for sooner, later in pairwise(stream.times_s)]
    return not gaps or quantile(gaps, 0.99) <= p99_tbt


def share_of_ttft(streams: Sequence[Stream], ttft: float, now: float) -> float:
    return fmean(ttft_s(stream, now) <= ttft for stream in streams)


def share_of_tpot(streams: Sequence[Stream], tpot: float) -> float:
    """Unfinished requests count as late."""
    return fmean(stream.is_complete and latency_of(stream).tpot_s <= tpot for stream in streams)


def iterations(lifetimes: Lifetimes) -> list[DecodeIteration]:
    return [each for all_of_one in lifetimes.iterations.values() for each in all_of_one]


def loaded(lifetimes: Lifetimes) -> list[DecodeIteration]:
    """Returns the iterations up to the last admission, because batches only shrink after it."""
    last_s = max(lifetimes.times("admitted"), default=float("inf"))
    return [each for each in iterations(lifetimes) if each.end_s <= last_s]


def share_within(durations_s: Sequence[float], bound_s: float) -> float:
    return fmean(duration_s <= bound_s for duration_s in durations_s)


def tokens_between(streams: Sequence[Stream], begin_s: float, end_s: float) -> int:
    return sum(begin_s <= time_s < end_s for stream in streams for time_s in stream.times_s)


def median_batch(all_of_them: Sequence[DecodeIteration]) -> float:
    return quantile([each.num_tokens for each in all_of_them], 0.5)
