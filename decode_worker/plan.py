"""What a decode instance is to do at an iteration boundary, as its schedule says it."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.protocol.messages import Work
from alignedserve.types import RequestKey


@dataclass
class DecodePlan:
    # start to copy the KV of these; their blocks are taken, `pulled` or `pull_failed` follows
    pulls: list[Work] = field(default_factory=list)
    # these, of which there is no KV, start: their blocks are taken, and they may run at once
    new_prompts: list[Work] = field(default_factory=list)
    # these compute all that they have pending, one token as a rule, and sample the next: `sampled` follows
    run: list[RequestKey] = field(default_factory=list)
    # these compute so many tokens and are not done with it: `computed` follows
    chunks: list[tuple[RequestKey, int]] = field(default_factory=list)
    # all whose eviction is wanted now, whether it was said before or not
    wants_evicted: list[RequestKey] = field(default_factory=list)
    # nothing runs for so long, unless something happens before: real time is about to join
    hold_s: float = 0.0

    @property
    def goes_on(self) -> bool:
        """The next plan need not wait for anything."""
        return bool(self.run or self.chunks or self.new_prompts)
