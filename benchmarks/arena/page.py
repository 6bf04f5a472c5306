"""The arena's page: a leaderboard, regrets by regime, and the worst scenarios with commands that repeat them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from benchmarks.arena.bound import possible
from benchmarks.arena.regimes import DIMENSIONS
from benchmarks.arena.regret import Judged, Standing, at, be_by_value, by_value, standings

NUM_WORST = 12


def page(
    judged: Sequence[Judged], policy: str, machine: str, command: str, failed: Mapping[str, str] | None = None
) -> str:
    """Returns the page. `failed`: errors by scenario and policy."""
    return "\n".join(_lines(judged, policy, machine, command, failed or {})) + "\n"


def _lines(
    judged: Sequence[Judged], policy: str, machine: str, command: str, failed: Mapping[str, str]
) -> Iterator[str]:
    numbers = sorted(each.regime.number for each in judged)
    yield "# Arena"
    yield ""
    yield f"{len(judged)} scenarios, numbers {numbers[0]} to {numbers[-1]}, in virtual time on {machine}: `{command}`."
    yield ""
    yield from _words(judged)
    yield ""
    yield from _leaderboard(standings(judged))
    yield ""
    yield f"## Regret of `{policy}` by regime"
    yield ""
    yield from _by_regime(judged, policy)
    yield ""
    yield f"## Where `{policy}` is furthest behind"
    yield ""
    yield from _worst(judged, policy)
    yield ""
    yield f"## Where `{policy}` is furthest from what is possible"
    yield ""
    yield from _furthest(judged, policy)
    if failed:
        yield ""
        yield "## Errors"
        yield ""
        yield from (f"- {place}: {error}" for place, error in failed.items())


def _words(judged: Sequence[Judged]) -> Iterator[str]:
    num_apart = sum(each.tells_apart for each in judged)
    num_late = sum(each.regime.has_objectives for each in judged)
    yield (
        "- **Best in**: in how many scenarios no policy is better by more than noise. It is a share of the "
        f"{num_apart} in which policies differ by more."
    )
    yield (
        "- **Regret**: by how many points of real time in time a policy is behind the best. It is counted in the "
        f"{num_late} scenarios in which real time has objectives."
    )
    yield (
        "- **Best effort**: output tokens per second, or jobs within their windows. Both are shares of the most under "
        "policies with level real time, that is, within a point. **Windows**: by how many points of these jobs a "
        "policy is behind."
    )
    yield (
        "- **Answers**: the shortest mean time of answers under any policy, as a share of this policy's. They count "
        "where real time has no objectives that can be kept. Best effort is then compared among policies that answer "
        "as soon."
    )
    yield "- **Goodput**: real time in time where more comes than fits, as a share of the most."
    yield (
        "- **What is possible**: at most this share is in time on a machine that knows all lengths and divides itself "
        "without loss (`benchmarks/arena/bound.py`). It is compared where no more comes than fits."
    )


def _leaderboard(found: Sequence[Standing]) -> Iterator[str]:
    yield (
        "| policy | best in | regret, mean | p95 | p98 | worst | best effort, mean | p5 | windows, mean | worst "
        "| answers, mean | goodput, mean | least | of what is possible, mean | least |"
    )
    yield "| --- | " + "---: | " * 14
    for each in found:
        yield (
            f"| `{each.policy}` | {_percent(each.won)} | {100 * each.mean:.2f} | {100 * each.p95:.1f} "
            f"| {100 * each.p98:.1f} | {100 * each.worst:.1f} | {_share(each.be_mean)} | {_share(each.be_p5)} "
            f"| {_points(each.windows_mean)} | {_points(each.windows_worst)} | {_share(each.answer_mean)} "
            f"| {_share(each.overload_mean)} | {_share(each.overload_worst)} "
            f"| {_share(each.possible_mean)} | {_share(each.possible_worst)} |"
        )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f} %"


def _points(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f}"


def _by_regime(judged: Sequence[Judged], policy: str) -> Iterator[str]:
    yield "| regime | | scenarios | mean, points | p95 | worst | scenarios | best effort, mean | least |"
    yield "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for dimension in DIMENSIONS:
        regrets, be = by_value(judged, dimension, policy), be_by_value(judged, dimension, policy)
        for value in sorted({*regrets, *be}):
            own, shares = sorted(regrets.get(value, [])), sorted(be.get(value, []))
            points = (
                f"{100 * fmean(own):.2f} | {100 * at(own, 0.95):.1f} | {100 * own[-1]:.1f}"
                if own
                else " | | "
            )
            least = f"{fmean(shares):.2f} | {shares[0]:.2f}" if shares else " | "
            yield (
                f"| {dimension.replace('_', ' ')} | {value} | {len(own)} | {points} | {len(shares)} | {least} |"
            )


def _worst(judged: Sequence[Judged], policy: str) -> Iterator[str]:
    yield "| scenario | in time | best | best effort, of the most | answers | again |"
    yield "| ---: | ---: | --- | ---: | ---: | --- |"

    def place(each: Judged) -> tuple[float, float, float]:
        own = each.verdicts[policy]
        return -own.regret, _or_all(own.be_share), _or_all(own.answer_share)

    for each in sorted(judged, key=place)[:NUM_WORST]:
        own, best, verdict = each.score(policy), each.rival(policy), each.verdicts[policy]
        again = each.regime.command(tuple(dict.fromkeys((policy, best.policy))))
        yield (
            f"| {each.regime.number} | {100 * own.in_time:.1f} % | `{best.policy}` {100 * best.in_time:.1f} % "
            f"| {_share(verdict.be_share)} | {_share(verdict.answer_share)} | `{again}` |"
        )


def _furthest(judged: Sequence[Judged], policy: str) -> Iterator[str]:
    yield "| scenario | instances | load | objectives | in time | best | possible |"
    yield "| ---: | --- | ---: | --- | ---: | --- | ---: |"
    below = [(share, each) for each in judged if (share := each.verdicts[policy].possible_share) is not None]
    for _, each in sorted(below, key=lambda pair: pair[0])[:NUM_WORST]:
        regime, best = each.regime, each.rival(policy)
        yield (
            f"| {regime.number} | {regime.layout_name} | {regime.load:g} | {regime.objectives} "
            f"| {100 * each.score(policy).in_time:.1f} % | `{best.policy}` {100 * best.in_time:.1f} % "
            f"| {100 * possible(regime):.1f} % |"
        )


def _or_all(share: float | None) -> float:
    return 1.0 if share is None else share
