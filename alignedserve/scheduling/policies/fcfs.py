"""First come, first served: nothing is staged ahead, and lengths and classes don't matter. What DistServe does where
prefill and decode are apart, and the baseline."""

from __future__ import annotations

from alignedserve.scheduling.policies.base import Policy


class Fcfs(Policy):
    name = "fcfs"
    summary = "in order of arrival"
