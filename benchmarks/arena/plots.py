"""Plots the default's regret by regime, as a strip of dots each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.arena.regimes import DIMENSIONS
from benchmarks.arena.regret import Judged, by_value


def plot(judged: Sequence[Judged], policy: str, to: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [
        (f"{dimension.replace('_', ' ')}: {value}", regrets)
        for dimension in DIMENSIONS
        for value, regrets in sorted(by_value(judged, dimension, policy).items())
    ]
    figure, axes = pyplot.subplots(figsize=(8, 0.22 * len(rows) + 1.2))
    for place, (_, regrets) in enumerate(reversed(rows)):
        points = [100 * each for each in regrets]
        axes.plot(points, [place] * len(points), "o", alpha=0.4, markersize=4, color="tab:blue")
    axes.set_yticks(range(len(rows)), [name for name, _ in reversed(rows)], fontsize=7)
    axes.set_xlabel(f"points of real time that {policy} is behind the best")
    axes.axvline(1.0, color="gray", linewidth=0.7)
    axes.grid(axis="x", alpha=0.3)
    figure.tight_layout()
    figure.savefig(to, dpi=120)
    pyplot.close(figure)
