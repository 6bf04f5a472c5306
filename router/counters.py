"""Counts of events since the router started. The parts that decide increment them, and `status.py` reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from alignedserve.protocol.messages import SCHEDULING_S, DecodeReport, Moved, PrefillReport
from alignedserve.types import InstanceId


@dataclass(eq=False, slots=True)
class InstanceCounters:
    """The fields are explained at `messages.InstanceStats`."""

    num_preemptions: int = 0
    num_evictions: int = 0
    num_spills: int = 0
    num_batch_switches: int = 0
    num_batch_iterations: int = 0
    num_mixed_iterations: int = 0
    scheduling: list[int] = field(default_factory=lambda: [0] * (len(SCHEDULING_S) + 1))
    scheduling_s: float = 0.0
    num_computed_tokens: int = 0
    computing_s: float = 0.0
    num_asked_tokens: int = 0
    num_found_tokens: int = 0
    num_failed_pulls: int = 0
    num_handed_over: int = 0
    num_arriving_tokens: int = 0
    num_not_copied_tokens: int = 0
    num_checked_blocks: int = 0
    num_changed_blocks: int = 0
    moved: dict[str, Moved] = field(default_factory=dict)

    def add_report(self, report: PrefillReport | DecodeReport) -> None:
        if report.moved:
            self._add_moved(report.moved)
        if report.num_computed:
            self.num_computed_tokens += report.num_computed
            self.computing_s += report.duration_s
        self.num_asked_tokens += report.num_asked
        self.num_found_tokens += report.num_found
        if isinstance(report, DecodeReport):
            self._add_iteration(report)

    def _add_iteration(self, report: DecodeReport) -> None:
        self.num_arriving_tokens += report.num_arriving
        self.num_not_copied_tokens += report.num_not_copied
        if report.num_computed and report.batch:
            self.num_batch_iterations += 1
            self.num_mixed_iterations += report.is_mixed
        if report.scheduling_s is not None:
            self.scheduling[bisect_left(SCHEDULING_S, report.scheduling_s)] += 1
            self.scheduling_s += report.scheduling_s

    def _add_moved(self, all_moved: Iterable[Moved]) -> None:
        for each in all_moved:
            total = self.moved.setdefault(each.what, Moved(each.what, 0, 0.0))
            total.num_bytes += each.num_bytes
            total.seconds += each.seconds
            self.num_checked_blocks += each.num_checked
            self.num_changed_blocks += each.num_changed


class Counters:
    def __init__(self) -> None:
        # Requests that continued after a process with them was lost, by the process's role.
        self.recoveries: Counter[str] = Counter()
        # How often a request's KV was thrown away for lack of room.
        self.num_recomputed = 0
        # Role changes of instances, by the new role.
        self.role_changes: Counter[str] = Counter()
        # How often a real-time request took the RT fast path to a decode instance.
        self.num_fast_path = 0
        # How often a best-effort request left a decode instance while real time was on its way there.
        self.num_evicted_for_rt = 0
        self._instances: defaultdict[InstanceId, InstanceCounters] = defaultdict(InstanceCounters)

    def of(self, instance_id: InstanceId) -> InstanceCounters:
        """Returns the instance's counters, which outlive its process."""
        return self._instances[instance_id]
