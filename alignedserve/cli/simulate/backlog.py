"""A constant backlog of best effort: a fixed number of requests from the start, and a new one for each that ends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from alignedserve.sim.gateway import SimGateway, Stream
from alignedserve.sim.scenario import Scenario
from alignedserve.sim.trace import Arrival, Lengths


class Backlog:
    def __init__(
        self, scenario: Scenario, gateway: SimGateway, lengths: Sequence[Lengths], first_key: int
    ) -> None:
        """Its requests have keys from `first_key` on, and take the lengths in turn."""
        self._scenario = scenario
        self._gateway = gateway
        self._lengths = lengths
        self._first_key = first_key
        self._num_made = 0

    def start(self, size: int) -> None:
        self._gateway.listeners.append(self._ended)
        for _ in range(size):
            self._add()

    def _ended(self, stream: Stream) -> None:
        if stream.request.key < self._first_key:
            return
        if not stream.is_complete:
            # The next one would also be refused at once, and virtual time would stand still.
            raise ValueError(f"be_backlog: one of its requests was not accepted: {stream.outcome}")
        self._add()

    def _add(self) -> None:
        clock = self._gateway.world.clock
        lengths = self._lengths[self._num_made % len(self._lengths)]
        key = self._first_key + self._num_made
        request = self._scenario.request(key, Arrival(clock.now, lengths, "be"))
        self._num_made += 1
        clock.after(0.0, partial(self._gateway.submit, request))
