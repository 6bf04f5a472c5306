"""Draws a comparison of servers: chat alone and beside a batch job."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from alignedserve.bench.compare import MeasuredServer
from alignedserve.bench.figure import figure_class
from alignedserve.bench.results import Results

_COLORS = {"alone": "tab:gray", "beside batch": "tab:blue"}
_BATCH_COLOR = "tab:orange"
# Inches.
_WIDTH, _HEIGHT = 14.0, 4.2


def _p99(metric: str) -> Callable[[Results], float]:
    return lambda results: dict(results.summaries[metric].percentiles)[99.0]


PANELS: dict[str, Callable[[Results], float]] = {
    "chat in time, %": lambda results: 100 * results.attainment["rt"],
    "TTFT p99, ms": _p99("ttft"),
    "TPOT p99, ms": _p99("tpot"),
}


def draw(found: Sequence[MeasuredServer], path: Path) -> None:
    """Draws the comparison to a file. Raises ValueError if matplotlib is not installed."""
    figure = figure_class()(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    labels = [each.server.label for each in found]
    *panels, batch = figure.subplots(1, len(PANELS) + 1, squeeze=False)[0]
    for axes, (title, value) in zip(panels, PANELS.items(), strict=True):
        for place, (name, color) in enumerate(_COLORS.items()):
            heights = [value(each.runs[name]) for each in found]
            bars = axes.bar(
                [x + 0.4 * place for x in range(len(found))], heights, 0.38, color=color, label=name
            )
            axes.bar_label(bars, fmt="%.0f")
        axes.set_xticks([x + 0.2 for x in range(len(found))], labels)
        axes.set_title(title)
    panels[0].legend(loc="lower left")
    bars = batch.bar(range(len(found)), [each.lines_per_s or 0.0 for each in found], 0.5, color=_BATCH_COLOR)
    batch.bar_label(
        bars, ["ended" if each.lines_per_s is None else f"{each.lines_per_s:.2f}" for each in found]
    )
    batch.set_xticks(range(len(found)), labels)
    batch.set_title("batch lines/s beside chat")
    figure.savefig(path, format="png", dpi=120)
