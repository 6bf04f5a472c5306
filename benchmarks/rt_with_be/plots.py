"""The pictures of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.rt_with_be.arithmetic import LEAST_OF_BE, MOST_OF_RT, Row, middle, worths

COLORS = {
    "aligned": "tab:blue",
    "priority": "tab:orange",
    "fcfs": "tab:gray",
    "vllm": "tab:olive",
    "vllm-priority": "tab:green",
}
OTHER_COLOR = "tab:purple"
RT_NAMES, BE_NAMES = ("TTFT p50", "TTFT p99", "TBT p99"), ("BE (a)", "BE (b)")


def draw_all(rows: Sequence[Row], out: Path) -> None:
    """Draws the pictures for which there are rows."""
    for part in ("live", "sim", "live_bursts"):
        some = [row for row in rows if row["part"] == part]
        if worths(some):
            figure = Figure(figsize=(11, 4.5), layout="constrained")
            _ratios(figure, some)
            figure.savefig(out / f"rt_with_be-{part}.png", format="png", dpi=120)
    goodput = [row for row in rows if row["part"] == "goodput"]
    if goodput:
        figure = Figure(figsize=(11, 4.5), layout="constrained")
        _goodput(figure, goodput)
        figure.savefig(out / "rt_with_be-goodput.png", format="png", dpi=120)


def _ratios(figure: Figure, rows: Sequence[Row]) -> None:
    rt, be = figure.subplots(1, 2, width_ratios=(3, 2))
    found = {key: astuple(middle(each)) for key, each in worths(rows).items()}
    for index, ((_, place, policy), values) in enumerate(found.items()):
        for axes, some in ((rt, values[:3]), (be, values[3:])):
            width = 0.8 / len(found)
            places = [number + index * width for number in range(len(some))]
            hatch = None if place == "1+1" else "//"
            color = COLORS.get(policy, OTHER_COLOR)
            axes.bar(places, some, width, label=f"{policy}, {place}", color=color, hatch=hatch)
    _finish(rt, RT_NAMES, MOST_OF_RT, "RT beside BE over RT alone")
    _finish(be, BE_NAMES, LEAST_OF_BE, "BE beside RT over what was expected")
    rt.set_yscale("log")
    rt.legend()


def _finish(axes: Axes, names: Sequence[str], aim: float, title: str) -> None:
    axes.set_xticks([number + 0.4 for number in range(len(names))], names)
    axes.axhline(aim, color="tab:red", linestyle="--")
    axes.set(title=title)


def _goodput(figure: Figure, rows: Sequence[Row]) -> None:
    rt, be = figure.subplots(1, 2)
    names = [f"{row['policy']}\n{row['lengths']}\n{row['place']}" for row in rows]
    colors = [COLORS.get(row["policy"], OTHER_COLOR) for row in rows]
    rt.bar(names, [row["rt_per_s"] for row in rows], color=colors)
    be.bar(names, [row["be_tokens_per_s"] for row in rows], color=colors)
    rt.set(title="RT requests/s of which 90 % are kept")
    be.set(title="BE tokens/s at that rate")
    for axes in (rt, be):
        axes.tick_params(axis="x", labelsize=7)
