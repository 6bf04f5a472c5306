"""What happened since the router started, counted where it is decided. Asked for now and then, by `status.py`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.messages import Moved
from alignedserve.types import InstanceId


@dataclass(eq=False, slots=True)
class InstanceCounters:
    """See messages.InstanceStats."""

    num_preemptions: int = 0
    num_evictions: int = 0
    num_spills: int = 0
    num_batch_switches: int = 0
    moved: dict[str, Moved] = field(default_factory=dict)

    def add_moved(self, all_moved: Iterable[Moved]) -> None:
        for each in all_moved:
            total = self.moved.setdefault(each.what, Moved(each.what, 0, 0.0))
            total.num_bytes += each.num_bytes
            total.seconds += each.seconds


class Counters:
    def __init__(self) -> None:
        # role of a process that was lost -> requests that went on without it
        self.recoveries: Counter[str] = Counter()
        self._instances: defaultdict[InstanceId, InstanceCounters] = defaultdict(InstanceCounters)

    def of(self, instance_id: InstanceId) -> InstanceCounters:
        """They outlive the instance's process."""
        return self._instances[instance_id]
