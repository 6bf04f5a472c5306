"""First come, first served: nothing is staged ahead, and lengths and classes don't matter. It is the default of all
parts (`scheduling/policy.py`), and the baseline.

With separate prefill and decode, DistServe does this. On colocated instances, vLLM does it: running requests first,
chunks of prompts within a token budget, admission above a watermark of free blocks, and preemption of the youngest
request.
"""

from __future__ import annotations

from alignedserve.scheduling.policy import Policy


class Fcfs(Policy):
    name = "fcfs"
    summary = "in order of arrival"
