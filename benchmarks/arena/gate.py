"""How far the default may be behind. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.arena.regret import Judged, standings

# How far behind it may be, as shares of real time: in nearly all scenarios, and in any.
NEARLY_ALWAYS, EVER = 0.01, 0.03
NEARLY = 0.98
# The least shares: of the most best effort at level real time, and of the most goodput above what fits.
BEST_EFFORT, GOODPUT = 0.95, 0.85


def failures(judged: Sequence[Judged], policy: str) -> list[str]:
    return [*_failures(judged, policy)]


def _failures(judged: Sequence[Judged], policy: str) -> Iterator[str]:
    own = [each.verdicts[policy] for each in judged]
    behind = [each.regime.number for each in judged if each.verdicts[policy].regret > NEARLY_ALWAYS]
    if len(behind) > (1 - NEARLY) * len(own):
        yield f"{policy} is more than {100 * NEARLY_ALWAYS:g} point behind in {len(behind)} of {len(own)}: {behind}"
    for each in judged:
        verdict, number = each.verdicts[policy], each.regime.number
        if verdict.regret > EVER:
            yield f"scenario {number}: {policy} is {100 * verdict.regret:.1f} points behind"
        if verdict.be_share is not None and verdict.be_share < BEST_EFFORT:
            yield f"scenario {number}: {policy} has {verdict.be_share:.2f} of the best effort of the best"
        goodput_share = verdict.goodput_share if each.regime.is_overloaded else None
        if goodput_share is not None and goodput_share < GOODPUT:
            yield f"scenario {number}: {policy} has {goodput_share:.2f} of the best goodput"
    means = {each.policy: each.mean for each in standings(judged)}
    for other in (each for each in means if means[each] < means[policy]):
        yield f"{other} has a smaller mean regret than {policy}"
