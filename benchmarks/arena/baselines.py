"""The papers' baselines: preempted requests lose their KV and recompute it. Elsewhere here, KV is swapped.

`fcfs-recompute` is vLLM on colocated instances and DistServe on separate ones. `sarathi-recompute` is Sarathi-Serve.
`prompts-first-recompute` is an earlier vLLM, in which an iteration has either prompts or decodes.
"""

from __future__ import annotations

from dataclasses import replace

from alignedserve.scheduling.config import SchedulingConfig
from alignedserve.scheduling.policies.fcfs import Fcfs
from alignedserve.scheduling.policies.sarathi import Sarathi
from alignedserve.scheduling.policy import Policy
from research.papers.baselines import PromptsFirst


def _recomputing(config: SchedulingConfig) -> SchedulingConfig:
    """Returns the configuration as `make_policy` changes it for this mode."""
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
    """Returns the value of `alignedserve simulate --policy` for it."""
    found = BASELINES.get(policy)
    return f"{found.__module__}:{found.__qualname__}" if found else policy


def name_of(path: str) -> str:
    names = {path_of(name): name for name in BASELINES}
    return names.get(path, path)
