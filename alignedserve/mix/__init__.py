"""How real-time (RT) and best-effort (BE) requests share the island: by name of the policy, and in numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated


@dataclass(frozen=True)
class Discipline:
    # RT goes before BE wherever both wait, and BE gives way before RT
    has_classes: bool
    # RT goes by slack; iterations, chunks, and what BE may take of blocks and slots are bounded for its sake
    has_deadlines: bool


DISCIPLINES = {
    "aligned": Discipline(has_classes=True, has_deadlines=True),
    # what others do, to compare with: static priorities, and none
    "priority": Discipline(has_classes=True, has_deadlines=False),
    "fcfs": Discipline(has_classes=False, has_deadlines=False),
}


@dataclass(frozen=True)
class MixConfig:
    be_share: Annotated[
        float, "of an instance's time that best effort gets at least, while any of it waits"
    ] = 0.05
    rt_headroom: Annotated[float, "of blocks and slots that best effort leaves free for real time"] = 0.05
    chunk_share: Annotated[float, "of the tightest TTFT objective that a best-effort chunk may take"] = 0.2
    be_pace: Annotated[
        float, "of the pace best effort could have, enough beside real time: decode iterations are no longer"
    ] = 0.7

    def __post_init__(self) -> None:
        for name in ("be_share", "rt_headroom", "chunk_share", "be_pace"):
            value, may_be_0 = getattr(self, name), name in ("be_share", "rt_headroom")
            if not (0 <= value < 1 and (value or may_be_0)):
                raise ValueError(f"{name}={value}: must be {'from' if may_be_0 else 'above'} 0, below 1")
