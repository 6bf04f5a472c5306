"""The actions of a prefill instance at an iteration boundary, as decided by its schedule."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.protocol.messages import Work
from alignedserve.types import RequestKey


@dataclass
class PrefillPlan:
    # Prompts to preempt: their computed KV is saved, and their blocks become free. `preempted` follows when no copy is
    # running. This is carried out first.
    preempted: list[RequestKey] = field(default_factory=list)
    # Prompts that start. They have all their blocks.
    new_prompts: list[Work] = field(default_factory=list)
    # New prompts with KV to copy from the pool. `loaded` follows, or `abort` and then `saved` if the copy failed.
    loads: list[Work] = field(default_factory=list)
    # Candidates with KV to copy from the pool. `staged` follows, or `unstage` and then `staged` if the copy failed.
    stages: list[Work] = field(default_factory=list)
    # Prompts to compute and the number of their tokens, the most urgent first. `computed` follows.
    chunks: list[tuple[RequestKey, int]] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether the next plan can be made immediately, without waiting for a wake."""
        return bool(self.chunks or self.preempted)
