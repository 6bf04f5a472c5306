"""The arena's page: a leaderboard, regrets by regime, and the worst scenarios with what shows each again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean

from benchmarks.arena.regimes import DIMENSIONS
from benchmarks.arena.regret import Judged, Standing, at, by_value, standings

NUM_WORST = 12


def page(judged: Sequence[Judged], policy: str, machine: str, command: str) -> str:
    return "\n".join(_lines(judged, policy, machine, command)) + "\n"


def _lines(judged: Sequence[Judged], policy: str, machine: str, command: str) -> Iterator[str]:
    numbers = sorted(each.regime.number for each in judged)
    yield "# Arena"
    yield ""
    yield f"{len(judged)} scenarios, numbers {numbers[0]} to {numbers[-1]}, in virtual time on {machine}: `{command}`."
    yield ""
    yield (
        "A policy's regret is how many points less of real time it has in time than the best policy of the scenario. "
        "Best effort is compared where real time is level (within a point), as a share of the most. Goodput is what is "
        "in time above what fits, as a share of the most."
    )
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


def _leaderboard(found: Sequence[Standing]) -> Iterator[str]:
    yield (
        "| policy | best in | regret, mean | p95 | p98 | worst | best effort, mean | p5 "
        "| goodput above what fits, mean | least |"
    )
    yield "| --- | " + "---: | " * 9
    for each in found:
        yield (
            f"| `{each.policy}` | {100 * each.won:.0f} % | {100 * each.mean:.2f} | {100 * each.p95:.1f} "
            f"| {100 * each.p98:.1f} | {100 * each.worst:.1f} | {_share(each.be_mean)} | {_share(each.be_p5)} "
            f"| {_share(each.overload_mean)} | {_share(each.overload_worst)} |"
        )


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _by_regime(judged: Sequence[Judged], policy: str) -> Iterator[str]:
    yield "| regime | | scenarios | mean, points | p95 | worst |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for dimension in DIMENSIONS:
        for value, regrets in sorted(by_value(judged, dimension, policy).items()):
            ascending = sorted(regrets)
            yield (
                f"| {dimension.replace('_', ' ')} | {value} | {len(regrets)} | {100 * fmean(regrets):.2f} "
                f"| {100 * at(ascending, 0.95):.1f} | {100 * ascending[-1]:.1f} |"
            )


def _worst(judged: Sequence[Judged], policy: str) -> Iterator[str]:
    yield "| scenario | in time | best | best effort, of the most | again |"
    yield "| ---: | ---: | --- | ---: | --- |"

    def place(each: Judged) -> tuple[float, float]:
        own = each.verdicts[policy]
        return -own.regret, 1.0 if own.be_share is None else own.be_share

    for each in sorted(judged, key=place)[:NUM_WORST]:
        others = [score for score in each.scores if score.policy != policy]
        best = max(others or each.scores, key=lambda score: (score.in_time, score.be_tokens_per_s))
        own = next(score for score in each.scores if score.policy == policy)
        again = each.regime.command(tuple(dict.fromkeys((policy, best.policy))))
        yield (
            f"| {each.regime.number} | {100 * own.in_time:.1f} % | `{best.policy}` {100 * best.in_time:.1f} % "
            f"| {_share(each.verdicts[policy].be_share)} | `{again}` |"
        )
