"""First come, first served: nothing is staged ahead, and lengths and classes don't matter. This is what DistServe does
where prefill and decode are apart, and what vLLM does on colocated instances: running requests first, chunks of
prompts within a token budget, admission above a watermark of free blocks, and the youngest request is preempted. It is
what parts do by default (`base.py`), and the baseline."""

from __future__ import annotations

from alignedserve.scheduling.policies.base import Policy


class Fcfs(Policy):
    name = "fcfs"
    summary = "in order of arrival"
