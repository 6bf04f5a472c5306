"""The links of the host on which an island's instances run, and which of them each instance's copies cross.

Instances take the host's GPUs in turn, prefill instances first: with n GPUs each, instance i has n of them from GPU i *
n on.

- *PCIe.* `gpus_per_pcie_root` consecutive GPUs are behind one root. Its bandwidth is that of one GPU's x16 in each
  direction.
- *NVLink.* Each instance's ports have the bandwidth of its channel, in each direction. The switch between ports slows
  no copy (NVSwitch).
- *Host memory.* Each copy between the pool and a GPU reads or writes it once. Both directions count together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from alignedserve.sim.links import Crossing, SharedLink
from alignedserve.timing.cost import Channels, CostModel
from alignedserve.types import InstanceId

Crossings = tuple[Crossing, ...]


@dataclass(frozen=True)
class Sharing:
    """How copies share links. None: as in the cost model."""

    # False: all links are infinite, so that no copy slows another.
    is_on: bool = True
    gpus_per_pcie_root: int | None = None
    host_memory_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Ports:
    """The links that an instance's copies cross, by direction."""

    from_pool: Crossings = ()
    to_pool: Crossings = ()
    nvlink_in: Crossings = ()
    nvlink_out: Crossings = ()


@dataclass(frozen=True)
class LinkUse:
    """The use of a link in a span of time."""

    name: str
    # The share of the time in which at least one copy crossed the link.
    busy: float
    # The share of the time in which the link made some copy slower than the copy's own channel.
    slowing: float
    num_bytes: float


class HostLinks:
    def __init__(self, cost: CostModel, sharing: Sharing, instance_ids: Sequence[InstanceId]) -> None:
        self._num_gpus = cost.host.gpus_per_instance
        self._gpus_per_root = sharing.gpus_per_pcie_root or cost.host.gpus_per_pcie_root
        self._is_on = sharing.is_on
        self._counted_from_s = 0.0
        memory_bytes_per_s = sharing.host_memory_bytes_per_s or cost.host.memory_bytes_per_s or inf
        self._memory = self._link("host memory", memory_bytes_per_s)
        num_roots = -(-len(instance_ids) * self._num_gpus // self._gpus_per_root)
        self._roots = [self._root(root, cost.channels) for root in range(num_roots)]
        self._nvlinks = [self._nvlink(each, cost.channels.admit.bytes_per_s) for each in instance_ids]
        self.ports = {each: self._ports(index) for index, each in enumerate(instance_ids)}

    def _link(self, name: str, bytes_per_s: float) -> SharedLink:
        return SharedLink(name, bytes_per_s if self._is_on else inf)

    def _root(self, number: int, channels: Channels) -> tuple[SharedLink, SharedLink]:
        """Returns the links to GPUs and to the host. A channel is as fast as all GPUs of an instance, a root as fast as
        one of them."""
        load_bytes_per_s = max(channels.stage.bytes_per_s, channels.fetch.bytes_per_s)
        return (
            self._link(f"PCIe {number} to GPUs", load_bytes_per_s / self._num_gpus),
            self._link(f"PCIe {number} to host", channels.save.bytes_per_s / self._num_gpus),
        )

    def _nvlink(self, instance_id: InstanceId, bytes_per_s: float) -> tuple[SharedLink, SharedLink]:
        into, out = f"NVLink into {instance_id}", f"NVLink out of {instance_id}"
        return self._link(into, bytes_per_s), self._link(out, bytes_per_s)

    @property
    def links(self) -> list[SharedLink]:
        return [self._memory, *(link for pair in [*self._roots, *self._nvlinks] for link in pair)]

    def count_anew(self, now: float) -> None:
        """Restarts the counting: `use` covers the time from now on."""
        self._counted_from_s = now
        for link in self.links:
            link.count_anew(now)

    def use(self, now: float) -> list[LinkUse]:
        """Returns the use of all links that any copy has crossed."""
        for link in self.links:
            link.count(now)
        span_s = now - self._counted_from_s
        return [
            LinkUse(link.name, link.busy_s / span_s, link.limiting_s / span_s, link.num_bytes)
            for link in self.links
            if link.num_bytes
        ]

    def _ports(self, index: int) -> Ports:
        gpus = range(index * self._num_gpus, (index + 1) * self._num_gpus)
        roots = Counter(gpu // self._gpus_per_root for gpu in gpus)
        weights = {root: count / self._num_gpus for root, count in roots.items()}
        into, out = self._nvlinks[index]
        memory = Crossing(self._memory)
        return Ports(
            from_pool=(memory, *(Crossing(self._roots[root][0], weight) for root, weight in weights.items())),
            to_pool=(memory, *(Crossing(self._roots[root][1], weight) for root, weight in weights.items())),
            nvlink_in=(Crossing(into),),
            nvlink_out=(Crossing(out),),
        )
