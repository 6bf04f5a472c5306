"""The result of a comparison in a sentence: how much real time is in time, how far that is from the best of the others,
and how much best effort gets beside it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alignedserve.cli.simulate.compare import Row
from alignedserve.cli.simulate.trial import TrialOutcome
from alignedserve.scheduling.config import SchedulingConfig

# Shares of real time in time that differ by less than this are level.
LEVEL = 0.01


def verdict(rows: Sequence[Row], attainment: float) -> str | None:
    """Returns the sentence about the default policy if it is among them, otherwise about the first; None if there are
    no results. `attainment`: the share in time that is enough in a search for the highest rate."""
    told = [row for row in rows if row.outcome]
    if not told:
        return None
    policies = list(dict.fromkeys(row.setting.policy for row in rows))
    default = SchedulingConfig().policy
    about = default if default in policies else policies[0]
    ours = [row for row in told if row.setting.policy == about]
    if not ours:
        best = max(told, key=_value)
        return (
            f"{about} reaches {100 * attainment:g} % attainment for real time at no rate; "
            f"{_alone(best, attainment)}."
        )
    own = max(ours, key=_value)
    others = [row for row in told if (row.setting.policy != about if len(policies) > 1 else row is not own)]
    return f"{'; '.join(_parts(own, others, _Names(told), attainment))}."


def _alone(best: Row, attainment: float) -> str:
    return next(_parts(best, [], _Names([best]), attainment))


def _parts(own: Row, others: Sequence[Row], names: _Names, attainment: float) -> Iterator[str]:
    has_rt = _outcome(own).mixture.rt.num_requests > 0
    if own.tried:
        yield f"{names.of(own)} reaches {100 * attainment:g} % attainment for real time {_up_to(own, others, names)}"
    elif has_rt:
        yield f"{names.of(own)} reaches {_percent(own)} attainment for real time{_beside(own, others, names)}"
    if _outcome(own).mixture.be.num_requests:
        best_effort = "best effort" if has_rt else f"best effort under {names.of(own)}"
        yield f"{best_effort} gets {_be_tokens_per_s(own):.0f} tokens/s{_be_beside(own, others, names)}"


def _up_to(own: Row, others: Sequence[Row], names: _Names) -> str:
    rate = own.request_rate or 0.0
    if not others:
        return f"up to {rate:.3g} requests/s"
    best = max(others, key=_value)
    best_rate = best.request_rate or 0.0
    if best_rate > rate:
        share = rate / best_rate
        return (
            f"up to {rate:.3g} requests/s, {share:.2f} of the {best_rate:.3g} of {names.of(best)}, the best"
        )
    return f"up to {rate:.3g} requests/s, the most: next is {names.of(best)} with {best_rate:.3g}"


def _beside(own: Row, others: Sequence[Row], names: _Names) -> str:
    if not others:
        return ""
    best = max(others, key=_value)
    ahead = _in_time(own) - _in_time(best)
    if ahead < 0:
        return f", {-100 * ahead:.1f} points behind {names.of(best)}, the best"
    return f", the most: next is {names.of(best)}, {100 * ahead:.1f} points behind"


def _be_beside(own: Row, others: Sequence[Row], names: _Names) -> str:
    """Compares best effort with the best setting that has no less real time in time."""
    # (Shares that are a point apart differ from LEVEL by rounding alone.)
    level = [row for row in others if _in_time(row) >= _in_time(own) - LEVEL - 1e-9]
    if not level:
        return ""
    most = max(level, key=_be_tokens_per_s)
    beside = " beside as much real time" if _outcome(own).mixture.rt.num_requests else ""
    if _be_tokens_per_s(most) <= _be_tokens_per_s(own):
        return f", the most{beside}"
    share = _be_tokens_per_s(own) / _be_tokens_per_s(most)
    return f", {share:.2f} of what {names.of(most)} gives it{beside}"


class _Names:
    """Names settings by their policies, or in full if the policies do not distinguish them."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._are_policies = len({str(row.setting).partition(" ")[2] for row in rows}) == 1

    def of(self, row: Row) -> str:
        return row.setting.policy if self._are_policies else str(row.setting)


def _outcome(row: Row) -> TrialOutcome:
    assert row.outcome is not None, "a row without one is left out"
    return row.outcome


def _value(row: Row) -> tuple[float, float]:
    """Returns the sort key of a row. A search looks for the highest rate."""
    rate = row.request_rate or 0.0 if row.tried else 0.0
    return rate or _in_time(row), _be_tokens_per_s(row)


def _in_time(row: Row) -> float:
    return _outcome(row).mixture.rt.attainment


def _be_tokens_per_s(row: Row) -> float:
    return _outcome(row).mixture.be.tokens_per_s


def _percent(row: Row) -> str:
    return f"{100 * _in_time(row):.1f} %"
