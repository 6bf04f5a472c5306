"""Links that share their bandwidth among the copies that cross them, max-min fairly. Pure: callers pass the time.

**Max-min fairness.** Let the rates of all flows rise together from zero. A flow stops rising at its own peak. As soon
as a link is full, every flow that crosses it stops. After that, a flow could only be faster if another that is no
faster became slower. Each flow is bounded by its peak or by a full link. Rates change only when a flow's bytes begin to
move and when they end, and are constant in between.

**Weights.** A copy of an instance with several GPUs is cut into equal parts, which move side by side at the same rate.
A link that carries half of the parts carries half of the copy's bytes, so the flow crosses it with a weight of 0.5.

A flow that is never slowed ends exactly when its channel alone would end it. Its end is computed from the remaining
bytes only after its rate has changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf

from alignedserve.timing.cost import CopyChannel


@dataclass(eq=False)
class SharedLink:
    name: str
    # The capacity in one direction. An infinite link never slows a flow.
    bytes_per_s: float = inf

    # ---- written by SharedLinks
    # For each flow, the share of its bytes that crosses this link.
    flows: dict[Flow, float] = field(default_factory=dict, repr=False)
    # Bytes per second that cross the link now.
    load: float = 0.0
    # Whether some flow is slower than its peak because this link is full.
    is_limiting: bool = False

    # ---- counted up to `counted_to_s`
    # Seconds in which at least one flow crossed the link.
    busy_s: float = 0.0
    # Seconds in which the link made some flow slower than its peak.
    limiting_s: float = 0.0
    num_bytes: float = 0.0
    counted_to_s: float = 0.0

    def count(self, now: float) -> None:
        elapsed_s, self.counted_to_s = now - self.counted_to_s, now
        if self.flows:
            self.busy_s += elapsed_s
            self.limiting_s += elapsed_s * self.is_limiting
            self.num_bytes += elapsed_s * self.load

    def count_anew(self, now: float) -> None:
        self.busy_s, self.limiting_s, self.num_bytes, self.counted_to_s = 0.0, 0.0, 0.0, now


@dataclass(frozen=True)
class Crossing:
    link: SharedLink
    weight: float = 1.0


@dataclass(eq=False)
class Flow:
    num_bytes: int
    # The channel's rate is the flow's peak, and its latency passes before the first byte moves.
    channel: CopyChannel
    crossings: Sequence[Crossing]
    begun_s: float

    # ---- written by SharedLinks, from the first byte on
    rate: float = 0.0
    # Bytes that had not arrived when the rate last changed, at `rate_since_s`.
    num_left: float = 0.0
    rate_since_s: float = 0.0
    # When the last byte arrives if the rate does not change any more, in seconds.
    end_s: float = inf

    @property
    def first_byte_s(self) -> float:
        return self.begun_s + self.channel.latency_s

    @property
    def peak(self) -> float:
        return self.channel.bytes_per_s

    def go_at(self, rate: float, now: float) -> None:
        self.num_left = max(self.num_left - self.rate * (now - self.rate_since_s), 0.0)
        self.rate, self.rate_since_s = rate, now
        self.end_s = now + self.num_left / rate


class SharedLinks:
    """The flows that are moving bytes. Each method returns the flows with a changed `end_s`."""

    def __init__(self) -> None:
        self._flows: dict[Flow, None] = {}

    def join(self, flow: Flow, now: float) -> list[Flow]:
        """Adds a flow, of which the first byte moves now. The flow itself is among those returned."""
        is_roomy = all(
            each.link.load + each.weight * flow.peak <= each.link.bytes_per_s for each in flow.crossings
        )
        self._count(flow.crossings, now)
        self._flows[flow] = None
        for each in flow.crossings:
            each.link.flows[flow] = each.weight
        flow.rate, flow.rate_since_s, flow.num_left = flow.peak, now, flow.num_bytes
        flow.end_s = flow.begun_s + flow.channel.seconds(flow.num_bytes)
        if not is_roomy:
            return list(dict.fromkeys([flow, *self._share(now)]))
        self._add_load(flow.crossings)
        return [flow]

    def leave(self, flow: Flow, now: float) -> list[Flow]:
        """Removes a flow that has ended or is stopped. Safe to repeat, and for a flow that has not begun to move
        bytes."""
        if flow not in self._flows:
            return []
        self._count(flow.crossings, now)
        del self._flows[flow]
        for each in flow.crossings:
            del each.link.flows[flow]
        if any(each.link.is_limiting for each in flow.crossings):
            return self._share(now, freed=flow.crossings)
        self._add_load(flow.crossings)
        return []

    def _share(self, now: float, freed: Sequence[Crossing] = ()) -> list[Flow]:
        crossings = [*freed, *(each for flow in self._flows for each in flow.crossings)]
        self._count(crossings, now)
        rates, limiting = fair_rates(self._flows)
        changed = [flow for flow, rate in rates.items() if rate != flow.rate]
        for flow in changed:
            flow.go_at(rates[flow], now)
        for each in crossings:
            each.link.is_limiting = each.link in limiting
        self._add_load(crossings)
        return changed

    @staticmethod
    def _count(crossings: Iterable[Crossing], now: float) -> None:
        for each in crossings:
            each.link.count(now)

    @staticmethod
    def _add_load(crossings: Iterable[Crossing]) -> None:
        for each in crossings:
            each.link.load = sum(weight * flow.rate for flow, weight in each.link.flows.items())


def fair_rates(flows: Iterable[Flow]) -> tuple[dict[Flow, float], set[SharedLink]]:
    """Returns the bytes per second of each flow, and the links that make some flow slower than its peak."""
    rising, rates, limiting = dict.fromkeys(flows), dict[Flow, float](), set[SharedLink]()
    links = dict.fromkeys(each.link for flow in rising for each in flow.crossings)
    while rising:
        levels = {link: _full_at(link, rates) for link in links}
        level = min(levels.values(), default=inf)
        stopped = {flow: flow.peak for flow in rising if flow.peak <= level}
        if not stopped:
            full = [link for link in links if levels[link] == level]
            limiting.update(full)
            stopped = {flow: level for link in full for flow in link.flows if flow in rising}
        rates.update(stopped)
        for flow in stopped:
            del rising[flow]
    return rates, limiting


def _full_at(link: SharedLink, rates: dict[Flow, float]) -> float:
    """Returns the rate of the flows that still rise at which the link is full, given the `rates` of those that have
    stopped."""
    left, weights = link.bytes_per_s, 0.0
    for flow, weight in link.flows.items():
        if flow in rates:
            left -= weight * rates[flow]
        else:
            weights += weight
    return left / weights if weights else inf
