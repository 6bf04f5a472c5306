"""The results of a simulated mixture of real time and best effort, by class, and the cost of mixing them."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise

from alignedserve.sim.gateway import Stream
from alignedserve.sim.report import Quantiles, quantiles
from alignedserve.sim.scenario import Ran

_NONE = Quantiles(0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True)
class RealTime:
    num_requests: int
    # The share of these requests with every token in time: see `is_kept`.
    attainment: float
    # Seconds to the first token. A request without one counts with the seconds that it has waited.
    ttft_s: Quantiles
    # Seconds between two tokens of a request.
    gap_s: Quantiles
    # Output tokens per second of the window.
    tokens_per_s: float
    # For each TBT objective in seconds, if there are several: the number of its requests, and their attainment.
    by_objective: dict[float, tuple[int, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class BestEffort:
    num_requests: int
    # Output tokens per second of the window.
    tokens_per_s: float
    # The share of the jobs with a deadline that met it; None: no job had one.
    jobs_kept: float | None


@dataclass(frozen=True)
class Mixture:
    """`num_computed` and `num_needed`: tokens, over complete requests."""

    rt: RealTime
    be: BestEffort
    num_evicted: int
    num_dropped: int
    num_sat_out: int
    num_interrupted: int
    moved_bytes: int
    num_computed: int
    num_needed: int
    # The share of the window in which decode instances computed.
    busy: float
    # Bytes of KV that were overwritten in blocks shared from both ends, copied to host memory and back.
    overwritten_bytes: int = 0

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def mixture(ran: Ran, begin_s: float, end_s: float) -> Mixture:
    """Returns the results of the window. Real time: requests that arrived in it. Pauses: over the whole run."""
    rt = [stream for stream in ran.streams if stream.request.tier == "rt"]
    be = [stream for stream in ran.streams if stream.request.tier == "be"]
    pauses, complete = ran.pauses, [stream for stream in ran.streams if stream.is_complete]
    num_moved_tokens = pauses.num_saved_tokens + pauses.num_fetched_tokens
    return Mixture(
        rt=real_time(rt, begin_s, end_s),
        be=best_effort(be, begin_s, end_s),
        num_evicted=len(pauses.evicted),
        num_dropped=len(pauses.dropped),
        num_sat_out=len(pauses.sat_out),
        num_interrupted=len(pauses.interrupted),
        moved_bytes=int(num_moved_tokens * ran.scenario.cost.pool_bytes_per_token),
        num_computed=sum(ran.computed[stream.request.key] for stream in complete),
        num_needed=sum(num_needed(stream) for stream in complete),
        busy=_busy(ran, begin_s, end_s),
        overwritten_bytes=pauses.overwritten_bytes,
    )


def num_needed(stream: Stream) -> int:
    """Returns the number of tokens that need KV: all but the last."""
    return len(stream.request.prompt) + len(stream.tokens) - 1


def is_kept(stream: Stream) -> bool:
    """Returns whether the request met its objectives, as the gateway's metrics judge it. A late token does not move
    later due times, except the first."""
    request, times_s = stream.request, stream.times_s
    if not stream.is_complete:
        return False
    first_due_s = request.arrival_s + (request.ttft_s if request.ttft_s is not None else float("inf"))
    if times_s[0] > first_due_s:
        return False
    if request.tbt_s is None:
        return True
    start_s = first_due_s if request.ttft_s is not None else times_s[0]
    return all(time_s <= start_s + k * request.tbt_s for k, time_s in enumerate(times_s))


def real_time(streams: Sequence[Stream], begin_s: float, end_s: float) -> RealTime:
    arrived = [stream for stream in streams if begin_s <= stream.request.arrival_s < end_s]
    if not arrived:
        return RealTime(0, 0.0, _NONE, _NONE, 0.0)
    firsts = [
        (stream.times_s[0] if stream.times_s else end_s) - stream.request.arrival_s for stream in arrived
    ]
    gaps = [later - sooner for stream in arrived for sooner, later in pairwise(stream.times_s)]
    return RealTime(
        num_requests=len(arrived),
        attainment=sum(map(is_kept, arrived)) / len(arrived),
        ttft_s=quantiles(firsts),
        gap_s=quantiles(gaps) if gaps else _NONE,
        tokens_per_s=_num_tokens(streams, begin_s, end_s) / (end_s - begin_s),
        by_objective=_by_objective(arrived),
    )


def _by_objective(streams: Sequence[Stream]) -> dict[float, tuple[int, float]]:
    kept: defaultdict[float, list[bool]] = defaultdict(list)
    for stream in streams:
        kept[stream.request.tbt_s or float("inf")].append(is_kept(stream))
    if len(kept) == 1:
        return {}
    return {tbt_s: (len(kept[tbt_s]), sum(kept[tbt_s]) / len(kept[tbt_s])) for tbt_s in sorted(kept)}


def _num_tokens(streams: Sequence[Stream], begin_s: float, end_s: float) -> int:
    """Counts the tokens in the window. Tokens are in order of time."""
    return sum(
        bisect_left(stream.times_s, end_s) - bisect_left(stream.times_s, begin_s) for stream in streams
    )


def best_effort(streams: Sequence[Stream], begin_s: float, end_s: float) -> BestEffort:
    num_tokens = _num_tokens(streams, begin_s, end_s)
    jobs = [stream for stream in streams if stream.request.deadline_s is not None]
    kept = [stream.is_complete and stream.ended_s <= (stream.request.deadline_s or 0.0) for stream in jobs]
    return BestEffort(len(streams), num_tokens / (end_s - begin_s), sum(kept) / len(kept) if kept else None)


def _busy(ran: Ran, begin_s: float, end_s: float) -> float:
    """Returns the share of the window in which decode instances computed. An iteration across an end of the window
    counts with its part inside."""
    computing_s = sum(
        max(0.0, min(each.end_s, end_s) - max(each.end_s - each.duration_s, begin_s))
        for iterations in ran.lifetimes.iterations.values()
        for each in iterations
    )
    return computing_s / ((end_s - begin_s) * ran.scenario.num_decoding)
