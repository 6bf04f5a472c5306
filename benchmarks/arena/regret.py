"""How far each policy is behind the best, in a scenario and over many. Pure.

Real time comes first: a policy's *regret* is the difference to the best policy's share of real time in time, in points.
Best effort comes second, among policies with equal real time, that is, within a point of the best. It is measured in
output tokens per second, or, with windows, as the share of jobs that end within theirs. Above the capacity, where most
requests may be late under every policy, *goodput* counts: the share in time, relative to the best policy's.

Up to the capacity, the share in time is also compared with what is possible (`bound.py`): what all policies do badly
shows nowhere else.

If real time has no objectives, or none that can be met, the share in time does not distinguish policies. Then the mean
seconds per answer count instead, and best effort is compared among policies with equally fast answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.arena.bound import possible
from benchmarks.arena.played import Score
from benchmarks.arena.regimes import Regime, value_of

# Real time is equal within this share, which is a point; answers are equal within this share of their seconds.
LEVEL, LEVEL_ANSWERS = 0.01, 0.05
# Digits of a regret. Rounding prevents a difference of exactly a point from being slightly more.
_DIGITS = 9
# Less best effort than this, under the best policy, counts as none.
_LEAST = 1e-9


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one policy in one scenario."""

    policy: str
    # A share; 0.01 is a point.
    regret: float
    # Its best effort relative to the most among policies with equal real time; None if its own real time is not equal,
    # or there is no best effort.
    be_share: float | None
    # Additional jobs that end within their windows under the best of these policies, as a share of all jobs; None if
    # there are no windows, or its real time is not equal.
    windows_regret: float | None
    # The shortest mean answer under any policy, relative to its own; None if real time has objectives that can be met.
    answer_share: float | None
    # Its share in time relative to the best policy's; None if that is zero, or nothing can be in time.
    goodput_share: float | None
    # Its share in time relative to what is possible (`bound.py`); None above the capacity, where that is more than can
    # be reached for long, and where nothing can be in time.
    possible_share: float | None
    # Whether no policy is better by more than noise.
    is_best: bool


@dataclass(frozen=True)
class Judged:
    regime: Regime
    scores: list[Score]
    verdicts: dict[str, Verdict]

    @property
    def tells_apart(self) -> bool:
        """Whether policies differ by more than noise."""
        return not all(each.is_best for each in self.verdicts.values())

    def score(self, policy: str) -> Score:
        return next(each for each in self.scores if each.policy == policy)

    def rival(self, policy: str) -> Score:
        """Returns the best of the other policies."""
        others = [each for each in self.scores if each.policy != policy]
        return max(
            others or self.scores,
            key=lambda each: (self.verdicts[each.policy].is_best, each.in_time, each.be_tokens_per_s),
        )


def judge(regime: Regime, scores: Sequence[Score]) -> Judged:
    best, soonest_s = max(each.in_time for each in scores), min(each.answer_s for each in scores)
    has_windows = regime.best_effort == "windows"

    def verdict(score: Score) -> Verdict:
        regret = round(best - score.in_time, _DIGITS)
        most = max((_best_effort(each, has_windows) for each in _level(score, scores, regime)), default=0.0)
        own = _best_effort(score, has_windows)
        is_compared = regret <= LEVEL and regime.best_effort != "none" and most > _LEAST
        be_share = own / most if is_compared else None
        answer_share = None if regime.is_feasible else _share_of_own(soonest_s, score.answer_s)
        return Verdict(
            policy=score.policy,
            regret=regret,
            be_share=be_share,
            windows_regret=round(most - own, _DIGITS) if is_compared and has_windows else None,
            answer_share=answer_share,
            goodput_share=score.in_time / best if best and regime.is_feasible else None,
            possible_share=_share_of_possible(score, regime),
            is_best=regret <= LEVEL
            and (be_share is None or be_share >= 1 - LEVEL)
            and (answer_share is None or answer_share >= 1 / (1 + LEVEL_ANSWERS)),
        )

    return Judged(regime, [*scores], {each.policy: verdict(each) for each in scores})


def _level(score: Score, scores: Sequence[Score], regime: Regime) -> list[Score]:
    """Returns the policies with which its best effort is compared."""
    best = max(each.in_time for each in scores)
    level = [each for each in scores if round(best - each.in_time, _DIGITS) <= LEVEL]
    if regime.is_feasible:
        return level
    return [each for each in level if each.answer_s <= (1 + LEVEL_ANSWERS) * score.answer_s]


def _share_of_possible(score: Score, regime: Regime) -> float | None:
    if regime.is_overloaded or not regime.is_feasible:
        return None
    most = possible(regime)
    return score.in_time / most if most else None


def _best_effort(score: Score, has_windows: bool) -> float:
    return score.jobs_in_time or 0.0 if has_windows else score.be_tokens_per_s


def _share_of_own(least: float, own: float) -> float:
    return least / own if own else 1.0


@dataclass(frozen=True, kw_only=True)
class Standing:
    """The result of one policy over many scenarios. Regrets are shares: 0.01 is a point."""

    policy: str
    # Share of scenarios in which no policy is better, among those that distinguish policies; None if there are none.
    won: float | None
    # Regrets over scenarios in which real time has objectives.
    mean: float
    p95: float
    p98: float
    worst: float
    # The mean and the 5th percentile of its share of best effort, over scenarios with equal real time.
    be_mean: float | None
    be_p5: float | None
    # Regrets in jobs within their windows.
    windows_mean: float | None
    windows_worst: float | None
    # The mean of the shortest answers relative to its own, if real time has no objectives that can be met.
    answer_mean: float | None
    # The mean and the least share of the best goodput above the capacity.
    overload_mean: float | None
    overload_worst: float | None
    # The mean and the least share of what is possible up to the capacity.
    possible_mean: float | None
    possible_worst: float | None


def standings(judged: Iterable[Judged]) -> list[Standing]:
    """Returns the standings, the best mean first."""
    of: dict[str, list[tuple[Judged, Verdict]]] = {}
    for each in judged:
        for policy, verdict in each.verdicts.items():
            of.setdefault(policy, []).append((each, verdict))
    return sorted(
        (_standing(policy, found) for policy, found in of.items()),
        key=lambda each: (each.mean, -(each.won or 0.0)),
    )


def _standing(policy: str, found: Sequence[tuple[Judged, Verdict]]) -> Standing:
    told_apart = [verdict.is_best for judged, verdict in found if judged.tells_apart]
    regrets = sorted(verdict.regret for judged, verdict in found if judged.regime.has_objectives) or [0.0]
    be = sorted(_there(verdict.be_share for _, verdict in found))
    windows = sorted(_there(verdict.windows_regret for _, verdict in found))
    answers = _there(verdict.answer_share for _, verdict in found)
    overload = sorted(
        _there(verdict.goodput_share for judged, verdict in found if judged.regime.is_overloaded)
    )
    possible_shares = _there(verdict.possible_share for _, verdict in found)
    return Standing(
        policy=policy,
        won=sum(told_apart) / len(told_apart) if told_apart else None,
        mean=fmean(regrets),
        p95=at(regrets, 0.95),
        p98=at(regrets, 0.98),
        worst=regrets[-1],
        be_mean=fmean(be) if be else None,
        be_p5=at(be, 0.05) if be else None,
        windows_mean=fmean(windows) if windows else None,
        windows_worst=windows[-1] if windows else None,
        answer_mean=fmean(answers) if answers else None,
        overload_mean=fmean(overload) if overload else None,
        overload_worst=overload[0] if overload else None,
        possible_mean=fmean(possible_shares) if possible_shares else None,
        possible_worst=min(possible_shares, default=None),
    )


def _there(values: Iterable[float | None]) -> list[float]:
    return [each for each in values if each is not None]


def at(ascending: Sequence[float], share: float) -> float:
    """Returns the quantile by nearest rank."""
    return ascending[max(0, -(-int(1000 * len(ascending) * share) // 1000) - 1)]


def by_value(judged: Iterable[Judged], dimension: str, policy: str) -> Mapping[str, list[float]]:
    """Returns a policy's regrets by the value of one of `regimes.DIMENSIONS`, where real time has objectives."""
    late = [each for each in judged if each.regime.has_objectives]
    return _by_value(late, dimension, policy, lambda verdict: verdict.regret)


def be_by_value(judged: Iterable[Judged], dimension: str, policy: str) -> Mapping[str, list[float]]:
    """Returns its shares of the most best effort in the same way, where it is compared."""
    return _by_value(judged, dimension, policy, lambda verdict: verdict.be_share)


def _by_value(
    judged: Iterable[Judged], dimension: str, policy: str, figure: Callable[[Verdict], float | None]
) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for each in judged:
        value = figure(each.verdicts[policy]) if policy in each.verdicts else None
        if value is not None:
            found.setdefault(value_of(each.regime, dimension), []).append(value)
    return found
