"""Real time beside best-effort jobs: as in BROS, the next job is submitted when the last one is done."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from alignedserve.sim.gateway import SimGateway, Stream
from alignedserve.sim.lifetime import Lifetimes
from alignedserve.sim.pauses import Pauses
from alignedserve.sim.scenario import Ran, Scenario
from alignedserve.sim.trace import Arrival, Lengths


class Jobs:
    """Jobs of `size` requests each, with keys from `first_key` on."""

    def __init__(
        self, scenario: Scenario, gateway: SimGateway, lengths: Sequence[Lengths], size: int, first_key: int
    ) -> None:
        self._scenario = scenario
        self._gateway = gateway
        self._lengths = lengths
        self._size = size
        self._first_key = self._next_key = first_key
        self._num_open = 0
        gateway.listeners.append(self._ended)

    def submit(self) -> None:
        clock = self._gateway.world.clock
        for _ in range(self._size):
            lengths = self._lengths[self._next_key % len(self._lengths)]
            request = self._scenario.request(self._next_key, Arrival(clock.now, lengths, "be"))
            clock.after(0.0, partial(self._gateway.submit, request))
            self._next_key += 1
        self._num_open = self._size

    def _ended(self, stream: Stream) -> None:
        if stream.request.key < self._first_key:
            return
        if not stream.is_complete:
            raise RuntimeError(f"a best-effort request ended with {stream.outcome}")
        self._num_open -= 1
        if not self._num_open:
            self.submit()


def beside_jobs(
    scenario: Scenario, real_time: Sequence[Arrival], lengths: Sequence[Lengths], size: int, until_s: float
) -> Ran:
    """Requests that are open at the end stay open."""
    island, lifetimes, pauses = scenario.island(), Lifetimes(), Pauses()
    island.router.observers += [lifetimes, pauses]
    requests = scenario.requests(real_time)
    island.submit(requests)
    island.start()
    if size:
        Jobs(scenario, island.gateways[0], lengths, size, len(requests) + 1).submit()
    island.run(until_s)
    return Ran(scenario, island.streams, lifetimes, pauses, island.world.computed)
