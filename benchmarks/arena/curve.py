"""Goodput of one scenario by load, from half to twice the capacity."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.arena.regret import Judged

LOADS = (0.5, 0.7, 0.8, 0.9, 1.0, 1.2, 1.5, 2.0)
# Allowed decrease of goodput as load rises, as a share of the capacity, because of noise.
MAY_FALL = 0.05


def goodput(judged: Judged, policy: str) -> float:
    """Returns the real time that is in time, as a share of the capacity."""
    return judged.regime.load * judged.score(policy).in_time


def falls(judged: Sequence[Judged], policy: str) -> list[str]:
    """Returns where goodput is less than at a lower load. `judged` is sorted by load, the lowest first."""
    found, most = list[str](), 0.0
    for each in judged:
        own = goodput(each, policy)
        if own < most - MAY_FALL:
            found.append(
                f"scenario {each.regime.number}: goodput of {policy} falls from {most:.2f} of what fits to {own:.2f} "
                f"at a load of {each.regime.load:g}"
            )
        most = max(most, own)
    return found


def curve_page(judged: Sequence[Judged], machine: str, command: str) -> str:
    return "\n".join(_lines(judged, machine, command)) + "\n"


def _lines(judged: Sequence[Judged], machine: str, command: str) -> Iterator[str]:
    regime = judged[0].regime
    yield f"# Goodput against load, scenario {regime.number}"
    yield ""
    yield (
        f"{regime.machine}, {regime.layout_name}, {regime.lengths}, objectives {regime.objectives}, best effort "
        f"{regime.best_effort}. In virtual time on {machine}: `{command}`. Load and goodput are shares of what fits. "
        "Goodput is the part of the load that is in time."
    )
    yield ""
    yield f"| policy | {' | '.join(f'{each.regime.load:g}' for each in judged)} |"
    yield "| --- | " + "---: | " * len(judged)
    for policy in policies_of(judged):
        yield f"| `{policy}` | {' | '.join(f'{goodput(each, policy):.2f}' for each in judged)} |"


def policies_of(judged: Sequence[Judged]) -> list[str]:
    """Returns the policies with a score at each load."""
    return [policy for policy in judged[0].verdicts if all(policy in each.verdicts for each in judged)]


def plot_curve(judged: Sequence[Judged], policy: str, to: Path) -> None:
    """Draws the curves. `policy` gets a thicker line."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    loads = [each.regime.load for each in judged]
    for name in policies_of(judged):
        shares = [goodput(each, name) for each in judged]
        axes.plot(loads, shares, "o-", markersize=3, linewidth=2.5 if name == policy else 1, label=name)
    axes.plot(loads, [min(load, 1.0) for load in loads], ":", color="gray", label="all that fits")
    axes.set_xlabel("load, as a share of what fits")
    axes.set_ylabel("in time, as a share of what fits")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(to, dpi=120)
    pyplot.close(figure)
