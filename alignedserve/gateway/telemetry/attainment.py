"""Counts real-time objectives that were met or missed since the last report to the launcher."""

from __future__ import annotations

from alignedserve.gateway.telemetry.metrics import TierMetrics
from alignedserve.protocol.messages import Attainment


class AttainmentCount:
    def __init__(self, metrics: TierMetrics) -> None:
        self._metrics = metrics
        self._num_met = self._num_missed = 0

    def take(self, are_late: bool, is_serving: bool = True) -> Attainment:
        """Returns the counts since the last call. `are_late`: whether batch jobs are expected to end too late.
        `is_serving`: whether the gateway accepts clients."""
        num_met, num_missed = (
            self._count(is_met=True),
            self._count(is_met=False) + self._metrics.num_turned_away,
        )
        taken = Attainment(num_met - self._num_met, num_missed - self._num_missed, are_late, is_serving)
        self._num_met, self._num_missed = num_met, num_missed
        return taken

    def _count(self, is_met: bool) -> int:
        return sum(count for (_, each), count in self._metrics.objectives.items() if each == is_met)
