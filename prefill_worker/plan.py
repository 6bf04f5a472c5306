"""What a prefill instance is to do at an iteration boundary, as its schedule says it."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.protocol.messages import Work
from alignedserve.types import RequestKey


@dataclass
class PrefillPlan:
    # these prompts save what was computed and leave their blocks; `preempted` follows, when no copy is under way.
    # Carried out before the rest.
    preempted: list[RequestKey] = field(default_factory=list)
    # these prompts start: all of their blocks are taken
    new_prompts: list[Work] = field(default_factory=list)
    # of those, start to copy cached KV from the pool; `loaded` follows (after `abort`, when that failed)
    loads: list[Work] = field(default_factory=list)
    # start to copy these candidates' KV from the pool; `staged` follows (after `abort`, when that failed)
    stages: list[Work] = field(default_factory=list)
    # how many tokens of whom to compute, the most urgent first; `computed` follows
    chunks: list[tuple[RequestKey, int]] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """The next plan need not wait for anything."""
        return bool(self.chunks or self.preempted)
