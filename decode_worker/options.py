"""How a decode instance uses its blocks and its time."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.mix import DISCIPLINES, Discipline, MixConfig


@dataclass(frozen=True)
class DecodeOptions:
    # victims are named so many iterations before blocks run out
    evict_ahead: int = 4
    # admission leaves blocks for so many iterations
    admit_ahead: int = 32
    # share of the blocks; the candidate batch is admitted while fewer are in use
    fill_mark: float = 1.0
    # how real time and best effort share
    discipline: Discipline = DISCIPLINES["aligned"]
    mix: MixConfig = field(default_factory=MixConfig)
