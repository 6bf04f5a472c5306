"""What happened since the router started, counted where it is decided. Asked for now and then, by `status.py`."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.protocol.messages import DecodeReport, Moved, PrefillReport
from alignedserve.types import InstanceId


@dataclass(eq=False, slots=True)
class InstanceCounters:
    """See messages.InstanceStats."""

    num_preemptions: int = 0
    num_evictions: int = 0
    num_spills: int = 0
    num_batch_switches: int = 0
    num_computed_tokens: int = 0
    computing_s: float = 0.0
    num_asked_tokens: int = 0
    num_found_tokens: int = 0
    moved: dict[str, Moved] = field(default_factory=dict)

    def add_report(self, report: PrefillReport | DecodeReport) -> None:
        self._add_moved(report.moved)
        if report.num_computed:
            self.num_computed_tokens += report.num_computed
            self.computing_s += report.duration_s
        self.num_asked_tokens += report.num_asked
        self.num_found_tokens += report.num_found

    def _add_moved(self, all_moved: Iterable[Moved]) -> None:
        for each in all_moved:
            total = self.moved.setdefault(each.what, Moved(each.what, 0, 0.0))
            total.num_bytes += each.num_bytes
            total.seconds += each.seconds


class Counters:
    def __init__(self) -> None:
        # role of a process that was lost -> requests that went on without it
        self.recoveries: Counter[str] = Counter()
        # requests whose KV was thrown away for want of room
        self.num_recomputed = 0
        # real-time requests that went to a decode instance at once
        self.num_fast_path = 0
        # best-effort requests that left one while real time was on its way there
        self.num_evicted_for_rt = 0
        self._instances: defaultdict[InstanceId, InstanceCounters] = defaultdict(InstanceCounters)

    def of(self, instance_id: InstanceId) -> InstanceCounters:
        """They outlive the instance's process."""
        return self._instances[instance_id]
