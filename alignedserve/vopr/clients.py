"""The clients. A plan names its kind of clients; all kinds have this interface."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from functools import partial

from alignedserve.sim.gateway import SimGateway, Stream
from alignedserve.sim.island import SimIsland
from alignedserve.types import InstanceId, RequestKey
from alignedserve.vopr.build import make_request_of
from alignedserve.vopr.failures import Broken
from alignedserve.vopr.history import Arrive


class Clients(ABC):
    def __init__(self, island: SimIsland) -> None:
        self._island = island

    @abstractmethod
    def arrive(self, arrive: Arrive) -> None:
        """Submits a client's request now."""

    @abstractmethod
    def leave(self, key: RequestKey) -> None:
        """Lets the client of this request leave. Safe if its request has ended, or never existed."""

    @property
    @abstractmethod
    def num_open(self) -> int:
        """The number of requests that have not ended."""

    @abstractmethod
    def check_end(self) -> None:
        """Raises Broken unless every request has ended as it should. Called when none is open."""

    @property
    @abstractmethod
    def streams(self) -> list[Stream]:
        """The answers that the clients have received."""


class DirectClients(Clients):
    """Simulated gateways, each the client of all of its requests: see sim/gateway.py for their checks."""

    # The allowed ends of a request. None is too long here.
    _ENDS = ("stop", "length", "abort", "lost")

    def __init__(self, island: SimIsland) -> None:
        super().__init__(island)
        self._gateways: dict[InstanceId, SimGateway] = {each.instance_id: each for each in island.gateways}
        self._of: dict[RequestKey, SimGateway] = {}
        self._num_ends: dict[RequestKey, int] = {}
        for gateway in island.gateways:
            gateway.listeners.append(self._ended)

    def arrive(self, arrive: Arrive) -> None:
        gateway = self._of[arrive.key] = self._gateways[arrive.gateway]
        request = make_request_of(arrive, self._island.now)
        gateway.when_awake(partial(gateway.submit, request))

    def leave(self, key: RequestKey) -> None:
        if gateway := self._of.get(key):
            gateway.when_awake(partial(gateway.abort, key))

    @property
    def num_open(self) -> int:
        return self._island.num_open

    @property
    def streams(self) -> list[Stream]:
        return self._island.streams

    def check_end(self) -> None:
        limits = self._island.config.router
        num_tokens = sum(len(stream.request.prompt) + len(stream.tokens) for stream in self.streams)
        # The most that can have waited, as a share of the limit. One owner may have half of it: see router/intake.py.
        fullest = max(
            len(self.streams) / limits.max_num_queued_reqs, num_tokens / limits.max_num_queued_tokens
        )
        full_from = {"full": 1.0, "owner_full": 0.5}
        for stream in self.streams:
            key = stream.request.key
            if self._num_ends.get(key) != 1:
                raise Broken(f"request {key} ended {self._num_ends.get(key, 0)} times")
            is_refused = fullest > full_from.get(stream.outcome or "", math.inf) and not stream.tokens
            if stream.outcome not in self._ENDS and not is_refused:
                raise Broken(f"request {key} ended with {stream.outcome}")

    def _ended(self, stream: Stream) -> None:
        key = stream.request.key
        self._num_ends[key] = self._num_ends.get(key, 0) + 1


CLIENTS: dict[str, type[Clients]] = {"direct": DirectClients}
