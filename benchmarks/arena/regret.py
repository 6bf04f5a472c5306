"""How far each policy is behind the best of a scenario, and of many. Pure.

Real time counts first: a policy's *regret* is how many points less of it are in time than under the best policy. Best
effort counts second, among policies whose real time is level: within a point of the best. Above what fits, where most
may be late under every policy, *goodput* counts: what is in time, as a share of the most that any policy has in time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.arena.played import Score
from benchmarks.arena.regimes import Regime

# Real time is level within this share, which is a point.
LEVEL = 0.01
# Digits of a regret: a difference of shares that is a point is not a little more than one.
_DIGITS = 9
# Fewer tokens per second than this, of the best, are none.
_LEAST_TOKENS_PER_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one policy did in one scenario."""

    policy: str
    # A share, 0.01 being a point.
    regret: float
    # Its best effort, as a share of the most among policies with level real time; None where its own is not level, or
    # there is no best effort.
    be_share: float | None
    # What is in time, as a share of the most under any policy; None where nothing is.
    goodput_share: float | None
    is_best: bool


@dataclass(frozen=True)
class Judged:
    regime: Regime
    scores: list[Score]
    verdicts: dict[str, Verdict]


def judge(regime: Regime, scores: Sequence[Score]) -> Judged:
    best = max(each.in_time for each in scores)
    regrets = {each.policy: round(best - each.in_time, _DIGITS) for each in scores}
    level = [each for each in scores if regrets[each.policy] <= LEVEL]
    most = max(each.be_tokens_per_s for each in level)
    has_be = regime.best_effort != "none" and most > _LEAST_TOKENS_PER_S

    def verdict(score: Score) -> Verdict:
        is_level = score in level
        be_share = score.be_tokens_per_s / most if has_be and is_level else None
        return Verdict(
            policy=score.policy,
            regret=regrets[score.policy],
            be_share=be_share,
            goodput_share=score.in_time / best if best else None,
            is_best=is_level and (be_share is None or be_share >= 1 - LEVEL),
        )

    return Judged(regime, [*scores], {each.policy: verdict(each) for each in scores})


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one policy did over many scenarios. Regrets are shares: 0.01 is a point."""

    policy: str
    # The share of scenarios in which nobody is better.
    won: float
    mean: float
    p95: float
    p98: float
    worst: float
    # The least share of best effort that it had in 95 % of the scenarios with level real time, and the mean.
    be_mean: float | None
    be_p5: float | None
    # The least share of the best goodput above what fits, and the mean.
    overload_mean: float | None
    overload_worst: float | None


def standings(judged: Iterable[Judged]) -> list[Standing]:
    """The best mean first."""
    of: dict[str, list[tuple[Regime, Verdict]]] = {}
    for each in judged:
        for policy, verdict in each.verdicts.items():
            of.setdefault(policy, []).append((each.regime, verdict))
    return sorted(
        (_standing(policy, found) for policy, found in of.items()), key=lambda each: (each.mean, -each.won)
    )


def _standing(policy: str, found: Sequence[tuple[Regime, Verdict]]) -> Standing:
    regrets = sorted(verdict.regret for _, verdict in found)
    be = sorted(verdict.be_share for _, verdict in found if verdict.be_share is not None)
    overload = sorted(
        verdict.goodput_share
        for regime, verdict in found
        if regime.is_overloaded and verdict.goodput_share is not None
    )
    return Standing(
        policy=policy,
        won=sum(verdict.is_best for _, verdict in found) / len(found),
        mean=fmean(regrets),
        p95=at(regrets, 0.95),
        p98=at(regrets, 0.98),
        worst=regrets[-1],
        be_mean=fmean(be) if be else None,
        be_p5=at(be, 0.05) if be else None,
        overload_mean=fmean(overload) if overload else None,
        overload_worst=overload[0] if overload else None,
    )


def at(ascending: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return ascending[max(0, -(-int(1000 * len(ascending) * share) // 1000) - 1)]


def by_value(judged: Iterable[Judged], dimension: str, policy: str) -> Mapping[str, list[float]]:
    """The regrets of a policy by the value of one of `regimes.DIMENSIONS`."""
    found: dict[str, list[float]] = {}
    for each in judged:
        if policy in each.verdicts:
            found.setdefault(each.regime.value(dimension), []).append(each.verdicts[policy].regret)
    return found
