"""How a prefill instance shares its time between real time (RT) and best effort (BE), and KV between prompts."""

from __future__ import annotations

from dataclasses import dataclass, field

from alignedserve.mix import DISCIPLINES, Discipline, MixConfig


@dataclass(frozen=True)
class PrefillOptions:
    discipline: Discipline = DISCIPLINES["aligned"]
    mix: MixConfig = field(default_factory=MixConfig)
    # prompts that begin like earlier ones reuse their KV
    shares_prefixes: bool = False
