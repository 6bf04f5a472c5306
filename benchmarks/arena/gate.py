"""The limits of how far the default may be behind. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from benchmarks.arena.regret import LEVEL, Judged, standings

# The largest regrets, as shares of real time: in NEARLY of the scenarios, and in any.
NEARLY_ALWAYS, EVER = 0.01, 0.03
NEARLY = 0.98
# The smallest shares of the most best effort at equal real time, and of the most goodput above the capacity.
BEST_EFFORT, GOODPUT = 0.95, 0.85
# Best effort is equal within this share.
LEVEL_BEST_EFFORT = 0.05


def failures(judged: Sequence[Judged], policy: str) -> list[str]:
    return [*_failures(judged, policy)]


def _failures(judged: Sequence[Judged], policy: str) -> Iterator[str]:
    can_be_late = [each for each in judged if each.regime.has_objectives]
    behind = [each.regime.number for each in can_be_late if each.verdicts[policy].regret > NEARLY_ALWAYS]
    if len(behind) > (1 - NEARLY) * len(can_be_late):
        yield (
            f"{policy} is more than {100 * NEARLY_ALWAYS:g} point behind in {len(behind)} of {len(can_be_late)}: "
            f"{behind}"
        )
    for each in judged:
        verdict, number = each.verdicts[policy], each.regime.number
        if verdict.regret > EVER:
            yield f"scenario {number}: {policy} is {100 * verdict.regret:.1f} points behind"
        if verdict.be_share is not None and verdict.be_share < BEST_EFFORT:
            what = "jobs in their windows" if verdict.windows_regret is not None else "best effort"
            yield f"scenario {number}: {policy} has {verdict.be_share:.2f} of the {what} of the best"
        goodput_share = verdict.goodput_share if each.regime.is_overloaded else None
        if goodput_share is not None and goodput_share < GOODPUT:
            yield f"scenario {number}: {policy} has {goodput_share:.2f} of the best goodput"
    means = {each.policy: each.mean for each in standings(judged)}
    for other in (each for each in means if means[each] < means[policy]):
        yield f"{other} has a smaller mean regret than {policy}"


def worse(then: Judged, now: Judged, policy: str) -> Iterator[str]:
    """Yields what has become worse in a scenario: the policy is further behind than ever is allowed, or its best effort
    is, and both are more than noise worse than they were."""
    before, after, number = then.verdicts[policy], now.verdicts[policy], now.regime.number
    if after.regret > max(EVER, before.regret + LEVEL):
        yield (
            f"scenario {number}: {policy} is {100 * after.regret:.1f} points behind, and was {100 * before.regret:.1f}"
        )
    had, has = before.be_share, after.be_share
    if had is not None and has is not None and has < min(BEST_EFFORT, had) - LEVEL_BEST_EFFORT:
        yield f"scenario {number}: {policy} has {has:.2f} of the best effort of the best, and had {had:.2f}"
