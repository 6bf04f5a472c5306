"""First come, first served: nothing is staged ahead, and lengths and classes don't matter. What DistServe does where
prefill and decode are apart. On colocated instances what vLLM does: running requests first, chunks of prompts within a
budget of tokens, and the youngest is preempted. It is what parts do by default (`base.py`), and the baseline."""

from __future__ import annotations

from alignedserve.scheduling.policies.base import Policy


class Fcfs(Policy):
    name = "fcfs"
    summary = "in order of arrival"
