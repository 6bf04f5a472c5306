"""What a prefill instance does at an iteration boundary, as its schedule decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.protocol.messages import Work
from alignedserve.types import RequestKey


@dataclass
class PrefillPlan:
    # These prompts are preempted: what was computed is saved, and their blocks become free. `preempted` follows when
    # no copy is under way. This is carried out before the rest.
    preempted: list[RequestKey] = field(default_factory=list)
    # These prompts start: all their blocks are taken.
    new_prompts: list[Work] = field(default_factory=list)
    # The cached KV of these, which are among the new prompts, is to be copied from the pool. `loaded` follows, or
    # `abort` and then `saved` if the copy failed.
    loads: list[Work] = field(default_factory=list)
    # The KV of these candidates is to be copied from the pool. `staged` follows, or `unstage` and then `staged` if the
    # copy failed.
    stages: list[Work] = field(default_factory=list)
    # How many tokens of which prompt are to be computed, the most urgent first; `computed` follows.
    chunks: list[tuple[RequestKey, int]] = field(default_factory=list)

    @property
    def goes_on(self) -> bool:
        """Whether the next plan can be made at once, without waiting for a wake."""
        return bool(self.chunks or self.preempted)
