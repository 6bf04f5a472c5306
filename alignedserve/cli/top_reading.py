"""Reads the state of a server for `alignedserve top`, and computes rates and quantiles between readings."""

from __future__ import annotations

import math
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import httpx2
from prometheus_client.parser import text_string_to_metric_families

from alignedserve.cli.http import refusal

TIERS = {"rt": "real time", "be": "best effort"}
PREFIX = "alignedserve:"
# Seconds over which rates and quantiles are computed.
RATE_S, WINDOW_S = 5.0, 60.0
NUM_JOBS = 20


class Away(Exception):
    """The server can't be reached, or its answer is unusable."""


@dataclass(frozen=True)
class Tier:
    num_tokens: float
    num_running: float
    num_waiting: float
    # Pairs of a bound in seconds and the number of first tokens within it, by ascending bounds.
    first_token: list[tuple[float, float]]


@dataclass(frozen=True)
class Reading:
    at_s: float
    # "ok", "degraded", or the reason for being unavailable.
    status: str
    tiers: dict[str, Tier]
    processes: list[dict[str, Any]]
    # None: the server has no store, so no jobs.
    jobs: list[dict[str, Any]] | None


@dataclass
class ReadingHistory:
    readings: list[Reading] = field(default_factory=list)

    def add(self, reading: Reading) -> None:
        # Counters restart at 0 with the gateway.
        if self.readings and any(
            reading.tiers[tier].num_tokens < self.latest.tiers[tier].num_tokens for tier in TIERS
        ):
            self.readings.clear()
        self.readings.append(reading)
        while self.readings[0].at_s < reading.at_s - 2 * WINDOW_S:
            del self.readings[0]

    @property
    def latest(self) -> Reading:
        return self.readings[-1]

    def since(self, seconds: float) -> Reading:
        """Returns the oldest reading of the last `seconds`, or the one before the latest."""
        within = [each for each in self.readings if each.at_s >= self.latest.at_s - seconds]
        return within[0] if len(within) > 1 else self.readings[-2:][0]

    def tokens_per_s(self, tier: str) -> float:
        older = self.since(RATE_S)
        passed_s = self.latest.at_s - older.at_s
        more = self.latest.tiers[tier].num_tokens - older.tiers[tier].num_tokens
        return more / passed_s if passed_s > 0 else 0.0

    def first_token_s(self, tier: str, share: float) -> float | None:
        """Returns a quantile of TTFT over the last minute; None without any request."""
        older, newer = (each.tiers[tier].first_token for each in (self.since(WINDOW_S), self.latest))
        # A gateway without observations may export no buckets.
        before = dict(older)
        return quantile(share, [(bound, count - before.get(bound, 0.0)) for bound, count in newer])


def quantile(share: float, counts: list[tuple[float, float]]) -> float | None:
    """Returns a quantile as Prometheus estimates it, from pairs of a bound and the number of values up to it."""
    if not counts or counts[-1][1] <= 0:
        return None
    rank = share * counts[-1][1]
    for (lower, below), (upper, count) in pairwise([(0.0, 0.0), *counts]):
        if count >= rank:
            return (
                lower if upper == float("inf") else lower + (upper - lower) * (rank - below) / (count - below)
            )
    return None


def look(http: httpx2.Client) -> Reading:
    """Returns the server's current state. Raises Away."""
    try:
        health = http.get("/health").json()
        text = _asked(http, "/metrics").text
        cluster = http.get("/v1/cluster")
        jobs = http.get("/v1/batches", params={"limit": NUM_JOBS})
        return Reading(
            time.monotonic(),
            health["status"] if health["status"] != "unavailable" else str(health.get("reason")),
            _tiers(text),
            [*map(_process, cluster.json()["processes"])] if cluster.is_success else [],
            [*map(_job, jobs.json()["data"])] if jobs.is_success else None,
        )
    except httpx2.HTTPError as error:
        raise Away(str(error) or type(error).__name__) from None
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        raise Away("the server is not AlignedServe") from None


def _process(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the shown fields of a process. Raises LookupError, TypeError or AttributeError for anything else."""
    blocks = {name: int(found["blocks"][name]) for name in ("used", "free")}
    requests = {str(state): int(count) for state, count in found["requests"].items()}
    numbers = {name: int(found[name]) for name in ("pid", "island")}
    texts = {name: str(found[name]) for name in ("instance_id", "state")}
    return {**texts, **numbers, "blocks": blocks, "requests": requests}


def _job(found: dict[str, Any]) -> dict[str, Any]:
    """Returns the shown fields of a batch job. Raises like _process."""
    counts = {name: int(found["request_counts"][name]) for name in ("completed", "failed", "total")}
    ours = found["alignedserve"]
    due = ours["estimated_completion_at"]
    return {
        "id": str(found["id"]),
        "status": str(found["status"]),
        "request_counts": counts,
        "expires_at": _finite(found["expires_at"]),
        "alignedserve": {
            "progress": _finite(ours["progress"]),
            "estimated_completion_at": None if due is None else _finite(due),
        },
    }


def _finite(found: float) -> float:
    if not math.isfinite(found):
        raise ValueError(f"{found} is not a number")
    return float(found)


def _asked(http: httpx2.Client, path: str) -> httpx2.Response:
    answer = http.get(path)
    if answer.is_error:
        raise Away(refusal(answer))
    return answer


def _tiers(text: str) -> dict[str, Tier]:
    sums: defaultdict[tuple[str, str], float] = defaultdict(float)
    # Sums over all gateways, by tier and bound.
    buckets: defaultdict[str, Counter[float]] = defaultdict(Counter)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            tier = sample.labels.get("tier", "")
            if sample.name == f"{PREFIX}time_to_first_token_seconds_bucket":
                buckets[tier][float(sample.labels["le"])] += sample.value  # type: ignore[assignment]
            else:
                sums[sample.name.removeprefix(PREFIX), tier] += sample.value
    return {
        tier: Tier(
            sums["generation_tokens_total", tier],
            sums["num_requests_running", tier],
            sums["num_requests_waiting", tier],
            sorted(buckets[tier].items()),
        )
        for tier in TIERS
    }
