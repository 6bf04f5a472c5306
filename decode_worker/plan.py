"""What a decode instance does at an iteration boundary, as its schedule decides."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.protocol.messages import Work
from alignedserve.types import RequestKey


@dataclass
class DecodePlan:
    # These requests leave at once, with their KV: their blocks are free before anybody takes any.
    drops: list[RequestKey] = field(default_factory=list)
    # The KV of these requests is to be copied here; their blocks are taken. `pulled` or `pull_failed` follows.
    pulls: list[Work] = field(default_factory=list)
    # These prompts, of which there is no KV, start: their blocks are taken, and they may run at once.
    new_prompts: list[Work] = field(default_factory=list)
    # Those of the new prompts of which the inputs of layers are kept in place of KV.
    keep_inputs: set[RequestKey] = field(default_factory=set)
    # These requests compute all their pending tokens, usually one, and sample the next: `sampled` follows.
    run: list[RequestKey] = field(default_factory=list)
    # These requests compute so many tokens, fewer than they have pending: `computed` follows.
    chunks: list[tuple[RequestKey, int]] = field(default_factory=list)
    # All requests whose eviction is wanted now, whether an earlier plan wanted it or not.
    wants_evicted: list[RequestKey] = field(default_factory=list)
    # For so many seconds nothing runs, unless something happens before: real time is about to join.
    hold_s: float = 0.0

    @property
    def goes_on(self) -> bool:
        """Whether the next plan can be made at once, without waiting for a wake."""
        return bool(self.run or self.chunks or self.new_prompts)
