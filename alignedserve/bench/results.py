"""Computes the metrics of a run, with the names and meanings of `vllm bench serve`.

Times are in seconds inside, and in milliseconds in the results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from alignedserve.bench.client import RequestOutcome

NAMES = {
    "ttft": "Time to First Token",
    "tpot": "Time per Output Token (excl. 1st token)",
    "itl": "Inter-token Latency",
    "e2el": "End-to-end Latency",
}


@dataclass(frozen=True)
class Times:
    """The times of one answered request, in seconds."""

    ttft: float
    # 0 for a single token.
    tpot: float
    itls: tuple[float, ...]
    e2el: float

    def meets(self, objectives_ms: Mapping[str, float]) -> bool:
        return all(getattr(self, name) * 1e3 <= most for name, most in objectives_ms.items())


@dataclass(frozen=True)
class Summary:
    """Statistics in milliseconds."""

    mean: float
    median: float
    std: float
    # (percent, value).
    percentiles: list[tuple[float, float]]


@dataclass(frozen=True)
class Results:
    completed: int
    failed: int
    total_input_tokens: int
    total_output_tokens: int
    duration: float
    request_throughput: float
    # None without objectives.
    request_goodput: float | None
    output_throughput: float
    total_token_throughput: float
    # Output tokens in the second with the most.
    max_output_tokens_per_s: float
    max_concurrent_requests: int
    # The statistics of each metric.
    summaries: dict[str, Summary]
    # Share of requests that met the objectives, by tier.
    attainment: dict[str, float]
    # Share of correct answers among those that could be checked; None if none could.
    correct: float | None


def is_whole(outcome: RequestOutcome) -> bool:
    return outcome.error is None and bool(outcome.times_s)


def times_of(outcome: RequestOutcome) -> Times:
    """Returns the times of a request with a complete answer."""
    first_s, last_s = outcome.times_s[0], outcome.times_s[-1]
    gaps = num_tokens(outcome) - 1
    return Times(
        ttft=first_s - outcome.start_s,
        tpot=(last_s - first_s) / gaps if gaps else 0.0,
        itls=tuple(after - before for before, after in pairwise(outcome.times_s)),
        e2el=last_s - outcome.start_s,
    )


def num_tokens(outcome: RequestOutcome) -> int:
    """Returns the number of tokens that the server reports, or the number of pieces of text."""
    return outcome.output_len or len(outcome.times_s)


def is_good(outcome: RequestOutcome, objectives_ms: Mapping[str, float]) -> bool:
    """Returns whether the request met its objectives. Best effort only has to be answered."""
    return is_whole(outcome) and (outcome.tier == "be" or times_of(outcome).meets(objectives_ms))


def evaluate(
    outcomes: Sequence[RequestOutcome],
    duration_s: float,
    objectives_ms: Mapping[str, float],
    percentiles: Sequence[float],
) -> Results:
    whole = [outcome for outcome in outcomes if is_whole(outcome)]
    num_input = sum(outcome.prompt_len for outcome in whole)
    num_output = sum(num_tokens(outcome) for outcome in whole)
    good = [outcome for outcome in outcomes if is_good(outcome, objectives_ms)]
    checked = [outcome.is_right for outcome in whole if outcome.is_right is not None]
    return Results(
        completed=len(whole),
        failed=len(outcomes) - len(whole),
        total_input_tokens=num_input,
        total_output_tokens=num_output,
        duration=duration_s,
        request_throughput=len(whole) / duration_s,
        request_goodput=len(good) / duration_s if objectives_ms else None,
        output_throughput=num_output / duration_s,
        total_token_throughput=(num_input + num_output) / duration_s,
        max_output_tokens_per_s=_most_tokens_in_a_second(whole),
        max_concurrent_requests=_most_requests_in_a_second(whole),
        summaries=summaries(whole, percentiles),
        attainment={tier: _share(outcomes, good, tier) for tier in _tiers(outcomes)} if objectives_ms else {},
        correct=sum(checked) / len(checked) if checked else None,
    )


def summaries(whole: Sequence[RequestOutcome], percentiles: Sequence[float]) -> dict[str, Summary]:
    times = [times_of(outcome) for outcome in whole]
    values = {
        "ttft": [each.ttft for each in times],
        # An answer of a single token has no TPOT.
        "tpot": [each.tpot for each, of in zip(times, whole, strict=True) if num_tokens(of) > 1],
        "itl": [gap for each in times for gap in each.itls],
        "e2el": [each.e2el for each in times],
    }
    return {name: _summary(some, percentiles) for name, some in values.items()}


def _summary(seconds: Sequence[float], percentiles: Sequence[float]) -> Summary:
    ms = np.array(seconds or [0.0]) * 1e3
    found = [(percent, float(np.percentile(ms, percent))) for percent in percentiles]
    return Summary(float(ms.mean()), float(np.median(ms)), float(ms.std()), found)


def _tiers(outcomes: Sequence[RequestOutcome]) -> list[str]:
    return sorted({outcome.tier for outcome in outcomes}, reverse=True)


def _share(outcomes: Sequence[RequestOutcome], good: Sequence[RequestOutcome], tier: str) -> float:
    return sum(each.tier == tier for each in good) / sum(each.tier == tier for each in outcomes)


def _seconds(whole: Sequence[RequestOutcome], times_s: Iterable[float]) -> NDArray[np.int64]:
    """Returns the second of the run that each time falls in. The run starts with the first request."""
    begun_s = min((each.start_s for each in whole), default=0.0)
    return np.floor(np.array(list(times_s)) - begun_s).astype(np.int64)


def _most_tokens_in_a_second(whole: Sequence[RequestOutcome]) -> float:
    seconds = _seconds(whole, (time_s for each in whole for time_s in each.times_s))
    return float(np.bincount(seconds, minlength=1).max())


def _most_requests_in_a_second(whole: Sequence[RequestOutcome]) -> int:
    """Returns the peak of concurrent requests as vLLM counts it: the most that ran within the same second."""
    first = _seconds(whole, (each.start_s for each in whole))
    last = _seconds(whole, (each.times_s[-1] for each in whole))
    here = [second for begin, end in zip(first, last, strict=True) for second in range(begin, end + 1)]
    return int(np.bincount(np.array(here, dtype=np.int64), minlength=1).max())
