"""How far each policy is behind the best of a scenario, and of many. Pure.

Real time counts first: a policy's *regret* is how many points less of it are in time than under the best policy. Best
effort counts second, among policies whose real time is level: within a point of the best. It is output tokens per
second, or, where jobs have windows, the share of jobs that end within theirs. Above what fits, where most may be late
under every policy, *goodput* counts: what is in time, as a share of the most that any policy has in time.

Where real time has no objectives, or none that can be kept, the share in time does not tell policies apart. There the
mean seconds of an answer count instead, and best effort is compared with that of policies which answer as soon.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.arena.played import Score
from benchmarks.arena.regimes import Regime, value_of

# Real time is level within this share, which is a point; answers are within this share of their seconds.
LEVEL, LEVEL_ANSWERS = 0.01, 0.05
# Digits of a regret: a difference of shares that is a point is not a little more than one.
_DIGITS = 9
# Less than this of best effort, under the best, is none.
_LEAST = 1e-9


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one policy did in one scenario."""

    policy: str
    # A share, 0.01 being a point.
    regret: float
    # Its best effort, as a share of the most among policies with level real time; None where its own is not level, or
    # there is no best effort.
    be_share: float | None
    # How many jobs more end within their windows under the best of these policies, as a share of all jobs; None where
    # there are no windows, or its real time is not level.
    windows_regret: float | None
    # The shortest mean answer under any policy as a share of its own; None where real time has objectives that can be
    # kept.
    answer_share: float | None
    # What is in time, as a share of the most under any policy; None where nothing is, or nothing can be.
    goodput_share: float | None
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
        """The best of the other policies."""
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
            is_best=regret <= LEVEL
            and (be_share is None or be_share >= 1 - LEVEL)
            and (answer_share is None or answer_share >= 1 / (1 + LEVEL_ANSWERS)),
        )

    return Judged(regime, [*scores], {each.policy: verdict(each) for each in scores})


def _level(score: Score, scores: Sequence[Score], regime: Regime) -> list[Score]:
    """Those whose best effort it has to match."""
    best = max(each.in_time for each in scores)
    level = [each for each in scores if round(best - each.in_time, _DIGITS) <= LEVEL]
    if regime.is_feasible:
        return level
    return [each for each in level if each.answer_s <= (1 + LEVEL_ANSWERS) * score.answer_s]


def _best_effort(score: Score, has_windows: bool) -> float:
    return score.jobs_in_time or 0.0 if has_windows else score.be_tokens_per_s


def _share_of_own(least: float, own: float) -> float:
    return least / own if own else 1.0


@dataclass(frozen=True, kw_only=True)
class Standing:
    """How one policy did over many scenarios. Regrets are shares: 0.01 is a point."""

    policy: str
    # The share of scenarios in which nobody is better, among those that tell policies apart; None if none does.
    won: float | None
    # Over scenarios in which real time has objectives.
    mean: float
    p95: float
    p98: float
    worst: float
    # The least share of best effort that it had in 95 % of the scenarios with level real time, and the mean.
    be_mean: float | None
    be_p5: float | None
    # How many points of jobs it is behind in windows.
    windows_mean: float | None
    windows_worst: float | None
    # The mean of the shortest answers as shares of its own, where real time has no objectives that can be kept.
    answer_mean: float | None
    # The least share of the best goodput above what fits, and the mean.
    overload_mean: float | None
    overload_worst: float | None


def standings(judged: Iterable[Judged]) -> list[Standing]:
    """The best mean first."""
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
    )


def _there(values: Iterable[float | None]) -> list[float]:
    return [each for each in values if each is not None]


def at(ascending: Sequence[float], share: float) -> float:
    """Nearest rank."""
    return ascending[max(0, -(-int(1000 * len(ascending) * share) // 1000) - 1)]


def by_value(judged: Iterable[Judged], dimension: str, policy: str) -> Mapping[str, list[float]]:
    """The regrets of a policy by the value of one of `regimes.DIMENSIONS`, where real time has objectives."""
    late = [each for each in judged if each.regime.has_objectives]
    return _by_value(late, dimension, policy, lambda verdict: verdict.regret)


def be_by_value(judged: Iterable[Judged], dimension: str, policy: str) -> Mapping[str, list[float]]:
    """Likewise its shares of the most best effort, where it is compared."""
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
