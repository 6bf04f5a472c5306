"""Sums over runs, and the lines that report them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from alignedserve.vopr.outcome import RunOutcome
from alignedserve.vopr.places import PLACES

# Actions that are not faults.
_OF_CLIENTS = ("arrive", "leave", "ask", "batch")
# How many of the least visited places are named.
_NUM_SELDOM = 8


@dataclass
class RunTally:
    num_seeds: int = 0
    virtual_s: float = 0.0
    num_requests: int = 0
    num_tokens: int = 0
    num_events: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    phases: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    # How many seeds have visited each place.
    visited: Counter[str] = field(default_factory=Counter)

    def add(self, outcome: RunOutcome) -> None:
        self.num_seeds += 1
        self.virtual_s += outcome.duration_s
        self.num_requests += outcome.num_requests
        self.num_tokens += outcome.num_tokens
        self.num_events += outcome.num_events
        self.happened.update(outcome.happened)
        self.phases.update(outcome.phases)
        self.ends.update(outcome.ends)
        self.visited.update(outcome.visited.keys())

    def lines(self, real_s: float) -> Iterator[str]:
        hours, minutes = self.virtual_s / 3600, max(real_s, 1e-9) / 60
        yield (
            f"{self.num_seeds} seeds: {hours:.1f} virtual hours in {minutes:.1f} minutes "
            f"({hours / minutes:.1f} hours a minute)"
        )
        yield f"{self.num_requests:,} requests, {self.num_tokens:,} tokens, {self.num_events:,} events"
        faults = {name: count for name, count in self.happened.items() if name not in _OF_CLIENTS}
        yield f"faults: {_listed(faults)}"
        num_left = self.happened["leave"] + self.ends["left"]
        yield f"clients that left: {num_left:,}; requests ended by: {_listed(self.ends)}"
        yield f"requests that were in a phase: {_listed(self.phases)}"
        yield from self._coverage()

    def _coverage(self) -> Iterator[str]:
        seldom = sorted(PLACES, key=lambda place: self.visited[place])
        num_visited = sum(place in self.visited for place in PLACES)
        yield f"places (what was under way, and what failed) visited: {num_visited} of {len(PLACES)}"
        named = [f"{place} {self.visited[place]}" for place in seldom if place in self.visited]
        yield f"by the fewest seeds: {', '.join(named[:_NUM_SELDOM]) or 'none'}"
        if never := [place for place in seldom if place not in self.visited]:
            yield f"by none: {', '.join(never[:_NUM_SELDOM])}{', ...' if len(never) > _NUM_SELDOM else ''}"


def _listed(counts: dict[str, int]) -> str:
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {count:,}" for name, count in ordered if count) or "none"
