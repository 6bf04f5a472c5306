"""The state that all processes of a simulated island share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from alignedserve.protocol.messages import AnyMessage
from alignedserve.router.router import Router
from alignedserve.sim.carrier import Carrier
from alignedserve.sim.clock import Clock
from alignedserve.sim.faults import NoFaults
from alignedserve.sim.foresight import Foresee, nothing
from alignedserve.sim.host import Encode, Latency
from alignedserve.sim.host_links import HostLinks
from alignedserve.sim.kv_model import KvModel
from alignedserve.sim.process import IslandRouter, SimProcess
from alignedserve.sim.segment import SimSegment
from alignedserve.sim.transfers import SimTransfers
from alignedserve.timing.cost import CostModel
from alignedserve.types import Epoch, InstanceId, RequestKey


@dataclass(frozen=True)
class Overhead:
    """The time that an instance's iterations take beyond the cost model. A live instance reports both
    (`timing/estimate.py`)."""

    # The engine's time relative to the cost model's. Other processes use the processor too.
    pace: float = 1.0
    # Seconds before each iteration in which the engine computes nothing: planning, messages, starting copies.
    outside_s: float = 0.0
    # Seconds that a message takes between two processes of one host, over loopback, including the sender's and the
    # receiver's turn.
    message_s: float = 0.0003
    # Ratios of measured to predicted iteration time, from which one is drawn for each iteration. The first is for
    # iterations of decodes only, the second for those with a part of a prompt. Empty: all take the predicted time.
    overruns: tuple[float, ...] = ()
    overruns_of_chunks: tuple[float, ...] = ()

    def engine_s(self, model_s: float, has_chunks: bool, dice: Random) -> float:
        """Returns the seconds in the engine of an iteration that takes `model_s` by the cost model."""
        predicted_s = self.pace * model_s
        overruns = self.overruns_of_chunks if has_chunks else self.overruns
        if not overruns:
            return predicted_s
        seconds = (predicted_s + self.outside_s) * dice.choice(overruns)
        return max(0.0, seconds - self.outside_s)


NO_OVERHEAD = Overhead()


def _ignore(process: SimProcess) -> None:
    pass


def _same(message: AnyMessage) -> AnyMessage:
    return message


@dataclass
class World:
    cost: CostModel
    latency: Latency
    host: HostLinks
    faults: NoFaults = field(default_factory=NoFaults)
    overhead: Overhead = NO_OVERHEAD
    # Draws what varies from one iteration to the next.
    dice: Random = field(default_factory=lambda: Random(0))
    # Seconds between two ticks of the router's core.
    tick_s: float = 0.05
    # Called with each process that the router's fence has killed.
    fenced: Callable[[SimProcess], None] = _ignore
    # Messages stay as they are, unless a test encodes them.
    encode: Encode = _same
    # Returns the output length that gateways predict for a request.
    foresee: Foresee = nothing
    clock: Clock = field(default_factory=Clock)
    processes: dict[InstanceId, SimProcess] = field(default_factory=dict)
    segments: dict[str, SimSegment] = field(default_factory=dict)
    # For each instance, the transfers of its latest life.
    transfers: dict[InstanceId, SimTransfers] = field(default_factory=dict)
    num_epochs: int = 0
    # Whether instances check the KV in their blocks and their own counts, and gateways all tokens. Figures are the same
    # without that: see `trusting.py`.
    is_checked: bool = True
    # The share of the pool's blocks that loads check for flipped bits.
    check_share: float = 1.0
    # For each flipped bit, the router's core at that time and its era.
    flips: list[tuple[Router | None, int]] = field(default_factory=list)
    # For each request, the tokens with KV that instances have computed. Written by the instances.
    computed: Counter[RequestKey] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.router: IslandRouter
        self.carrier = Carrier(self.clock)
        # The right KV of all requests.
        self.kv = KvModel(self._is_forbidden)

    def next_epoch(self) -> Epoch:
        self.num_epochs += 1
        return Epoch(self.num_epochs)

    def flip_bit(self, segment: SimSegment, number: int) -> None:
        """Changes the KV of one of the segment's blocks."""
        core = self.router.core
        self.flips.append((core, core.state.era if core else 0))
        segment.flip_bit(number, len(self.flips))

    def _is_forbidden(self, key: RequestKey, flaw: int) -> bool:
        """Returns whether the request must not have such KV: all loads are checked, or it is of an era that the router
        has begun since the bit flipped. A request that is alone may have kept its own KV."""
        if self.check_share == 1:
            return True
        core, (of_core, era) = self.router.core, self.flips[flaw - 1]
        state = core.state.requests.get(key) if core else None
        # A later router began with era 0.
        begun = era if core is of_core else 0
        return state is not None and state.era > begun and not state.is_alone
