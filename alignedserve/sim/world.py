"""What all processes of a simulated island share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from alignedserve.protocol.messages import AnyMessage
from alignedserve.sim.carrier import Carrier
from alignedserve.sim.clock import Clock
from alignedserve.sim.foresight import Foresee, nothing
from alignedserve.sim.host_links import HostLinks
from alignedserve.sim.network import Encode, Latency
from alignedserve.sim.process import SimProcess
from alignedserve.sim.segment import SimSegment
from alignedserve.timing.cost import CostModel
from alignedserve.types import Epoch, InstanceId, RequestKey

if TYPE_CHECKING:
    from alignedserve.sim.router import RouterProcess
    from alignedserve.sim.transfers import SimTransfers


def _always() -> bool:
    return True


def _same(message: AnyMessage) -> AnyMessage:
    return message


@dataclass
class World:
    cost: CostModel
    latency: Latency
    host: HostLinks
    # It is called once for each copy, and returns whether the copy succeeds.
    copy_works: Callable[[], bool] = _always
    # Messages go as they are unless a test wants them encoded.
    encode: Encode = _same
    # Returns the output length that gateways predict for a request.
    foresee: Foresee = nothing
    clock: Clock = field(default_factory=Clock)
    processes: dict[InstanceId, SimProcess] = field(default_factory=dict)
    segments: dict[str, SimSegment] = field(default_factory=dict)
    # Maps each instance to the transfers of its latest life.
    transfers: dict[InstanceId, SimTransfers] = field(default_factory=dict)
    num_epochs: int = 0
    # Counts for each request the tokens whose KV instances have computed. The instances write it.
    computed: Counter[RequestKey] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.router: RouterProcess
        self.carrier = Carrier(self.clock)

    def next_epoch(self) -> Epoch:
        self.num_epochs += 1
        return Epoch(self.num_epochs)
