"""When a claim counts as reproduced. Pure.

A gain is a ratio whose 1 is "no gain". A claim is reproduced with at least 80 % of what is claimed beyond that, partly
with less, and refuted where there is no gain, or the reverse: 2 % either way are noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

# The share of the claimed gain that reproduces a claim.
ENOUGH = 0.8
# A ratio that is nearer to 1 than this says nothing.
NOISE = 0.02
# A claimed bound that is exceeded by up to this factor is kept partly.
NEARLY = 2.0
# Differences are rounded off at so many digits, so that a value at a bound is within it.
_DIGITS = 9


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    PARTLY = "partly"
    REFUTED = "refuted"


def gain(claimed: float, ours: float) -> Verdict:
    """Ratios above 1. Where a claim is a range, `claimed` is its lower end; where it says "up to", the most."""
    if claimed <= 1 + NOISE:
        raise ValueError(f"claimed={claimed}: must be above {1 + NOISE}, else it is no gain")
    return amount(claimed - 1, ours - 1)


def amount(claimed: float, ours: float, noise: float = NOISE) -> Verdict:
    """What is claimed to be above 0: a share lost without some part, a difference of attainments."""
    if claimed <= 0:
        raise ValueError(f"claimed={claimed}: must be above 0")
    if round(ours - noise, _DIGITS) <= 0:
        return Verdict.REFUTED
    return Verdict.REPRODUCED if round(ours - ENOUGH * claimed, _DIGITS) >= 0 else Verdict.PARTLY


def at_most(claimed: float, ours: float) -> Verdict:
    """A cost that is claimed to be no more than this."""
    if ours <= claimed:
        return Verdict.REPRODUCED
    return Verdict.PARTLY if ours <= NEARLY * claimed else Verdict.REFUTED


def at_least(claimed: float, ours: float) -> Verdict:
    """A share that is claimed to be no less than this: half of it is partly."""
    if ours >= claimed:
        return Verdict.REPRODUCED
    return Verdict.PARTLY if ours >= claimed / NEARLY else Verdict.REFUTED


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Of a claim that says several things: all alike, or partly."""
    different = set(verdicts)
    if not different:
        raise ValueError("a claim without parts has no verdict")
    return different.pop() if len(different) == 1 else Verdict.PARTLY
