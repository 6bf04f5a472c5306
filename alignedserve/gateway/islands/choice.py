"""Chooses the island of a request. Pure.

A real-time request goes where its first token is expected soonest. That depends on the real-time prompts waiting there,
and on how much of its own prompt is not cached there. For best effort, all waiting prompts count.

An island is avoided if it has far more requests per decode instance than another, whatever it has cached. Requests
would decode slowly there while other instances idle.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

from alignedserve.protocol.messages import Load, Request
from alignedserve.scheduling.prefixes import PrefixAffinity

# An island is crowded if it has more requests per decode instance than CROWDED_TIMES those of another, plus
# CROWDED_MORE. Factors of 1 and 1.15 are no better (benchmarks/results/scheduling.md).
CROWDED_TIMES, CROWDED_MORE = 1.5, 8
# Prompt tokens that are remembered per island, at most: 30 MB.
MAX_TOKENS = 1 << 23


class IslandLoad:
    """Load of an island: the router's last report, and the requests that this gateway has sent there since."""

    def __init__(self) -> None:
        self.load: Load | None = None
        self._num_requests = 0
        # Uncached prompt tokens sent since, of real time and of all requests.
        self._num_rt_tokens = self._num_tokens = 0
        self._prefixes: PrefixAffinity | None = None
        self._max_tokens = 0

    def hear(self, load: Load) -> None:
        self.load = load
        self._num_requests = self._num_rt_tokens = self._num_tokens = 0
        if self._max_tokens != load.num_cache_tokens:
            self._max_tokens = load.num_cache_tokens
            max_tokens = min(self._max_tokens, MAX_TOKENS)
            self._prefixes = PrefixAffinity(max_tokens) if max_tokens else None

    @property
    def has_caches(self) -> bool:
        return self._prefixes is not None

    def sent(self, request: Request, hashes: Sequence[bytes]) -> None:
        """Counts a request that was sent there. `hashes` are its prompt's block hashes, or empty."""
        num_missing = self.num_missing(request, hashes)
        self._num_requests += 1
        self._num_tokens += num_missing
        if request.tier == "rt":
            self._num_rt_tokens += num_missing
        if self._prefixes:
            self._prefixes.add(hashes)

    def num_missing(self, request: Request, hashes: Sequence[bytes]) -> int:
        """Returns the number of prompt tokens that are not cached there."""
        num_known = self._prefixes.num_cached_tokens(hashes) if self._prefixes else 0
        return len(request.prompt) - num_known

    def requests_of_each(self, load: Load) -> float:
        """Returns the number of requests per decode instance."""
        return (load.num_requests + self._num_requests) / max(1, load.num_decodes)

    def wait_tokens(self, load: Load, request: Request, hashes: Sequence[bytes]) -> float:
        """Returns the number of tokens that a prefill instance computes until this prompt is done."""
        is_rt = request.tier == "rt"
        waiting = load.num_rt_tokens + self._num_rt_tokens if is_rt else load.num_tokens + self._num_tokens
        return waiting / max(1, load.num_prefills) + self.num_missing(request, hashes)


class Choosable(Protocol):
    @property
    def island_load(self) -> IslandLoad: ...

    @property
    def is_up(self) -> bool: ...

    @property
    def is_given_up(self) -> bool: ...

    @property
    def is_leaving(self) -> bool: ...

    @property
    def num_open(self) -> int: ...


AnyIsland = TypeVar("AnyIsland", bound=Choosable)


def best(
    islands: Iterable[AnyIsland], request: Request | None = None, hashes: Sequence[bytes] = ()
) -> AnyIsland:
    """Returns the island for this request, or for the next one if None. Equal islands: the first."""

    def availability(island: AnyIsland) -> tuple[bool, bool, bool]:
        return not island.is_up, island.is_given_up, island.is_leaving

    there = list(islands)
    best_there = min(map(availability, there))
    there = [island for island in there if availability(island) == best_there]
    if len(there) == 1:
        return there[0]
    loads = [island.island_load.load for island in there]
    known = [load for load in loads if load]
    if request is None or len(known) < len(loads):
        return min(there, key=lambda island: island.num_open)
    return _least(there, known, request, hashes)


def _least(
    there: Sequence[AnyIsland], loads: Sequence[Load], request: Request, hashes: Sequence[bytes]
) -> AnyIsland:
    counts = [island.island_load.requests_of_each(load) for island, load in zip(there, loads, strict=True)]
    most = CROWDED_TIMES * min(counts) + CROWDED_MORE
    are_speeds_known = all(load.tokens_per_s for load in loads)

    def rank(number: int) -> tuple[bool, bool, bool, bool, float, float, int]:
        island, load, count = there[number], loads[number], counts[number]
        is_rt = request.tier == "rt"
        wait = island.island_load.wait_tokens(load, request, hashes)
        if are_speeds_known:
            wait /= load.tokens_per_s
        is_late = is_rt and are_speeds_known and request.ttft_s is not None and wait > request.ttft_s
        return (
            not load.num_prefills,
            is_late,
            is_rt and load.is_full,
            count > most,
            wait,
            count,
            island.num_open,
        )

    return there[min(range(len(there)), key=rank)]
