"""When a claim counts as reproduced. Pure.

A gain is a ratio in which 1 means "no gain". A claim is reproduced with at least 80% of the claimed gain, partly
reproduced with less, and refuted without a gain or with a loss. Up to 2% either way is noise.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

# The share of the claimed gain that reproduces a claim.
ENOUGH = 0.8
# A ratio closer to 1 than this is meaningless.
NOISE = 0.02
# A cost that exceeds its claimed limit by up to this factor is partly reproduced.
NEARLY = 2.0
# Differences are rounded to this many digits, so that a value at a limit is within it.
_DIGITS = 9


class Verdict(StrEnum):
    REPRODUCED = "reproduced"
    PARTLY = "partly"
    REFUTED = "refuted"


def gain(claimed: float, ours: float) -> Verdict:
    """Compares ratios above 1. If the claim is a range, `claimed` is its lower end; if it says "up to", the maximum."""
    if claimed <= 1 + NOISE:
        raise ValueError(f"claimed={claimed}: must be above {1 + NOISE}, else it is no gain")
    return amount(claimed - 1, ours - 1)


def amount(claimed: float, ours: float, noise: float = NOISE) -> Verdict:
    """Compares values claimed to be above 0: a share lost without some part, or a difference between attainments."""
    if claimed <= 0:
        raise ValueError(f"claimed={claimed}: must be above 0")
    if round(ours - noise, _DIGITS) <= 0:
        return Verdict.REFUTED
    return Verdict.REPRODUCED if round(ours - ENOUGH * claimed, _DIGITS) >= 0 else Verdict.PARTLY


def at_most(claimed: float, ours: float) -> Verdict:
    """Judges a cost that is claimed to be no more than this."""
    if ours <= claimed:
        return Verdict.REPRODUCED
    return Verdict.PARTLY if ours <= NEARLY * claimed else Verdict.REFUTED


def at_least(claimed: float, ours: float) -> Verdict:
    """Judges a share that is claimed to be no less than this. Half of it counts as partly."""
    if ours >= claimed:
        return Verdict.REPRODUCED
    return Verdict.PARTLY if ours >= claimed / NEARLY else Verdict.REFUTED


def together(verdicts: Iterable[Verdict]) -> Verdict:
    """Combines the verdicts of a claim with several parts: the common verdict if all are the same, else partly."""
    different = set(verdicts)
    if not different:
        raise ValueError("a claim without parts has no verdict")
    return different.pop() if len(different) == 1 else Verdict.PARTLY
