"""The gateway's observations of requests, by tier: counts and histograms, as plain numbers.

Values are observed once per token or per request, in the event loop's thread. `exposition.py` makes Prometheus's text.
"""

from __future__ import annotations

import logging
import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

from alignedserve.protocol.messages import Attainment
from alignedserve.timing.sliding import SlidingMaximum

# In seconds, with vLLM's bounds, so that quantiles in its dashboards mean the same. Gaps between tokens have some
# smaller bounds.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
# Difference of predicted and true length, relative to the true one.
RELATIVE_ERROR = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0)
# In seconds, up to a week, the longest window of a batch job.
TURNAROUND_S = (
    *(1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 2700.0, 3600.0),
    *(5400.0, 7200.0, 10800.0, 14400.0, 21600.0, 28800.0, 43200.0, 64800.0, 86400.0),
    *(129600.0, 172800.0, 259200.0, 345600.0, 432000.0, 518400.0, 604800.0),
)
# The windows by which batch jobs are grouped, each with its upper bound in seconds.
WINDOWS = {"1h": 3600, "6h": 6 * 3600, "24h": 86400, "7d": 7 * 86400}
TOKENS = tuple(float(digit * 10**power) for power in range(5) for digit in (1, 2, 5))
# The kinds of objectives that a request may have, and those of which tokens decide before its end.
OBJECTIVES = ("ttft", "tbt", "deadline")
TOKEN_OBJECTIVES = OBJECTIVES[:2]
# The seconds for which what is read of each open request is used again: each page and each Prometheus asks.
SCAN_S = 1.0


class Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.sum = 0.0
        # The number of values between each bound and the one before it; at the end, of those above all bounds.
        self._counts = [0] * (len(bounds) + 1)

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        return sum(self._counts)

    def cumulative(self) -> list[tuple[str, float]]:
        """Returns pairs of a bound and the number of values up to it, as Prometheus has them."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self._counts)), strict=True))


class OpenRequest(Protocol):
    """A request that has not ended, as far as /metrics shows it before its end."""

    def silence_s(self, now: float) -> float:
        """Returns the seconds since its last token; 0 before the first."""

    def keeps(self, slo: str, now: float) -> bool | None:
        """Returns whether it meets this one of TOKEN_OBJECTIVES so far. None: it has none, or no token was due yet."""


class OpenNow(NamedTuple):
    """What the open requests of a tier were like at a time."""

    at_s: float
    longest_silence_s: float
    # See `TierMetrics.kept_so_far`.
    kept_so_far: Counter[tuple[str, bool]]


class TierMetrics:
    def __init__(self) -> None:
        self.open: set[OpenRequest] = set()
        self._open_now = OpenNow(-math.inf, 0.0, Counter())
        # The times between two tokens of a stream, which are silences that are over.
        self.silences = SlidingMaximum()
        self.time_to_first_token = Histogram(FIRST_TOKEN_S)
        self.inter_token_latency = Histogram(TOKEN_GAP_S)
        self.time_per_output_token = Histogram(TOKEN_GAP_S)
        self.e2e_latency = Histogram(REQUEST_S)
        self.queue_time = Histogram(REQUEST_S)
        self.prefill_time = Histogram(REQUEST_S)
        self.decode_time = Histogram(REQUEST_S)
        self.prompt_len = Histogram(TOKENS)
        self.output_len = Histogram(TOKENS)
        self.length_error = Histogram(RELATIVE_ERROR)
        self.num_prompt_tokens = 0
        self.num_output_tokens = 0
        # The number of ended requests by finish reason.
        self.ended: Counter[str] = Counter()
        # The number of requests that were rejected because the queue was full.
        self.num_turned_away = 0
        # The number of opened requests, by the source of their predicted length (lengths/prediction.py) or "none".
        self.predicted_by: Counter[str] = Counter()
        # The number of ended requests with an objective, by its kind (OBJECTIVES) and whether it was met.
        self.objectives: Counter[tuple[str, bool]] = Counter()

    def open_now(self, now: float) -> OpenNow:
        """Returns what open requests are like, or were like at most SCAN_S ago. There may be thousands."""
        if now - self._open_now.at_s >= SCAN_S:
            self._open_now = OpenNow(now, self.longest_silence_s(now), self.kept_so_far(now))
        return self._open_now

    def longest_silence_s(self, now: float) -> float:
        """Returns the longest time of the last minute in which a stream got no token. It may still last."""
        return max([self.silences.value(0.0, now), *(each.silence_s(now) for each in self.open)])

    def kept_so_far(self, now: float) -> Counter[tuple[str, bool]]:
        """Returns the number of open requests by TOKEN_OBJECTIVES and whether they meet each so far."""
        found = ((slo, each.keeps(slo, now)) for each in self.open for slo in TOKEN_OBJECTIVES)
        return Counter((slo, is_kept) for slo, is_kept in found if is_kept is not None)


class Metrics:
    def __init__(self) -> None:
        # Both exist from the start: a series that appears with its first value hides that value from `rate`.
        self._tiers = {"rt": TierMetrics(), "be": TierMetrics()}
        # The number of requests that were submitted again after their router had died.
        self.num_resubmitted = 0
        self.ignored_parameters = IgnoredParameters()
        # Attempts to deliver a webhook by outcome, and webhooks that were given up.
        self.webhooks: Counter[str] = Counter()
        # Seconds from the creation of a batch job until it was completed or had expired, by window.
        self.turnarounds = {window: Histogram(TURNAROUND_S) for window in WINDOWS}

    def line_was_late(self) -> None:
        """Counts a batch line that was not answered by its deadline, and perhaps never begun."""
        self._tiers["be"].objectives["deadline", False] += 1

    def job_was_over(self, created_at: int, over_at: int, window_s: int) -> None:
        """Counts a batch job that was completed or has expired."""
        window = next(name for name, most_s in WINDOWS.items() if window_s <= most_s)
        # The clock may have been set back meanwhile.
        self.turnarounds[window].observe(max(0, over_at - created_at))

    def of(self, tier: str) -> TierMetrics:
        return self._tiers[tier]

    def __iter__(self) -> Iterator[tuple[str, TierMetrics]]:
        return iter(self._tiers.items())


logger = logging.getLogger(__name__)

IGNORED_HEADER = "X-Ignored-Parameters"
# Names that the header and the log show. Others are a client's text, and may be anything.
_SHOWN_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Names that are logged, each once.
MAX_LOGGED = 64
# Labels of the metric: known parameters of other servers, and OTHER. None is a client's text.
OTHER = "other"
IGNORED_NAMES = frozenset(
    (
        *("early_stopping", "kv_transfer_params", "mm_processor_kwargs", "prediction", "priority"),
        *("prompt_cache_retention", "request_id", "rid", "spaces_between_special_tokens"),
        "web_search_options",
    )
)


class IgnoredParameters:
    def __init__(self) -> None:
        # The number of calls with the parameter, by its label.
        self.counts: Counter[str] = Counter()
        self._logged: set[str] = set()

    def note(self, names: Sequence[str]) -> dict[str, str]:
        """Counts the parameters of a call. Returns the header that names them."""
        shown = [name for name in names if _SHOWN_NAME.fullmatch(name)]
        for name in shown:
            if name not in self._logged and len(self._logged) < MAX_LOGGED:
                logger.info(
                    "%s: this parameter is ignored: it is unknown, or without effect on this model", name
                )
                self._logged.add(name)
        self.counts.update({name if name in IGNORED_NAMES else OTHER for name in names})
        return {IGNORED_HEADER: ", ".join(shown) or OTHER} if names else {}


class AttainmentCount:
    def __init__(self, metrics: TierMetrics) -> None:
        self._metrics = metrics
        self._num_met = self._num_missed = 0

    def take(self, are_late: bool, is_serving: bool = True) -> Attainment:
        """Returns the counts since the last call. `are_late`: whether batch jobs are expected to end too late.
        `is_serving`: whether the gateway accepts clients."""
        num_met, num_missed = (
            self._count(is_met=True),
            self._count(is_met=False) + self._metrics.num_turned_away,
        )
        taken = Attainment(num_met - self._num_met, num_missed - self._num_missed, are_late, is_serving)
        self._num_met, self._num_missed = num_met, num_missed
        return taken

    def _count(self, is_met: bool) -> int:
        return sum(count for (_, each), count in self._metrics.objectives.items() if each == is_met)
