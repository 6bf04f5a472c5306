"""Counts of events since the router started. The parts that decide increment them, and `status.py` reads them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable

from alignedserve.protocol.messages import SCHEDULING_S, DecodeReport, InstanceStats, Moved, PrefillReport
from alignedserve.types import InstanceId


class Counters:
    def __init__(self) -> None:
        # Requests that continued after a process with them was lost, by the process's role.
        self.recoveries: Counter[str] = Counter()
        # How often a gateway had the prefix cache reset.
        self.num_cache_resets = 0
        # How often a request's KV was thrown away for lack of room.
        self.num_recomputed = 0
        # Role changes of instances, by the new role.
        self.role_changes: Counter[str] = Counter()
        # How often a real-time request took the RT fast path to a decode instance.
        self.num_fast_path = 0
        # How often a best-effort request left a decode instance while real time was on its way there.
        self.num_evicted_for_rt = 0
        self._instances: defaultdict[InstanceId, InstanceStats] = defaultdict(_zeros)

    def of(self, instance_id: InstanceId) -> InstanceStats:
        """Returns the counters of an instance, which outlive its process. `status.py` sets the other fields."""
        return self._instances[instance_id]

    def add_report(self, sender: InstanceId, report: PrefillReport | DecodeReport) -> None:
        counted = self.of(sender)
        _add_moved(counted, report.moved)
        if report.num_computed:
            counted.num_computed_tokens += report.num_computed
            counted.computing_s += report.duration_s
        counted.num_asked_tokens += report.num_asked
        counted.num_found_tokens += report.num_found
        if isinstance(report, DecodeReport):
            _add_iteration(counted, report)


def _zeros() -> InstanceStats:
    return InstanceStats(scheduling=[0] * (len(SCHEDULING_S) + 1))


def _add_moved(counted: InstanceStats, all_moved: Iterable[Moved]) -> None:
    for each in all_moved:
        total = next((total for total in counted.moved if total.what == each.what), None)
        if total is None:
            total = Moved(each.what, 0, 0.0)
            counted.moved.append(total)
        total.num_bytes += each.num_bytes
        total.seconds += each.seconds
        counted.num_checked_blocks += each.num_checked
        counted.num_changed_blocks += each.num_changed


def _add_iteration(counted: InstanceStats, report: DecodeReport) -> None:
    counted.num_arriving_tokens += report.num_arriving
    counted.num_not_copied_tokens += report.num_not_copied
    if report.num_computed and report.batch:
        counted.num_batch_iterations += 1
        counted.num_mixed_iterations += report.is_mixed
    if report.scheduling_s is not None:
        counted.scheduling[bisect_left(SCHEDULING_S, report.scheduling_s)] += 1
        counted.scheduling_s += report.scheduling_s
