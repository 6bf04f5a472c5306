"""Baselines as papers had them: what is preempted loses its KV, and is computed again. Elsewhere here it is swapped.

`fcfs-recompute` is vLLM where prompts are chunked and DistServe where they are computed apart, `sarathi-recompute` is
Sarathi-Serve, and `prompts-first-recompute` is vLLM as it was before: an iteration has prompts, or it has decodes.
"""

from __future__ import annotations

from dataclasses import replace

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.base import Policy
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policies.sarathi import Sarathi
from benchmarks.papers.baselines import PromptsFirst


def _recomputing(config: SchedulingConfig) -> SchedulingConfig:
    """As `make_policy` changes a configuration with this mode."""
    return replace(config, preemption_mode="recompute", evict_ahead=1)


class FcfsRecompute(Fcfs):
    name = "fcfs-recompute"
    summary = f"{Fcfs.summary}; KV of what is preempted is computed again"

    def __init__(self, config: SchedulingConfig) -> None:
        super().__init__(_recomputing(config))


class SarathiRecompute(Sarathi):
    name = "sarathi-recompute"
    summary = f"{Sarathi.summary}; KV of what is preempted is computed again"

    def __init__(self, config: SchedulingConfig) -> None:
        super().__init__(_recomputing(config))


class PromptsFirstRecompute(PromptsFirst):
    name = "prompts-first-recompute"
    summary = f"{PromptsFirst.summary}; KV of what is preempted is computed again"

    def __init__(self, config: SchedulingConfig) -> None:
        super().__init__(_recomputing(config))


BASELINES: dict[str, type[Policy]] = {
    each.name: each for each in (FcfsRecompute, SarathiRecompute, PromptsFirstRecompute)
}


def path_of(policy: str) -> str:
    """What `alignedserve simulate --policy` takes."""
    found = BASELINES.get(policy)
    return f"{found.__module__}:{found.__qualname__}" if found else policy


def name_of(path: str) -> str:
    names = {path_of(name): name for name in BASELINES}
    return names.get(path, path)
