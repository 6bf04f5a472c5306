"""Draws a comparison: bars of attainment, TTFT and gaps for each setting, and of best effort's throughput."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from alignedserve.bench.figure import figure_class
from alignedserve.cli.simulate.compare import Row
from alignedserve.cli.simulate.trial import TrialOutcome

# In inches.
_WIDTH_OF_PANEL, _HEIGHT_OF_ROW, _HEIGHT_OF_REST = 4.0, 0.45, 1.4

# The name of a panel, and what each of its bars shows.
_Panel = tuple[str, dict[str, Callable[[TrialOutcome], float]]]
_REAL_TIME: list[_Panel] = [
    ("real time in time, %", {"": lambda outcome: 100 * outcome.mixture.rt.attainment}),
    (
        "TTFT, ms",
        {
            "p50": lambda outcome: 1000 * outcome.mixture.rt.ttft_s.p50,
            "p99": lambda outcome: 1000 * outcome.mixture.rt.ttft_s.p99,
        },
    ),
    (
        "gap between tokens, ms",
        {
            "p50": lambda outcome: 1000 * outcome.mixture.rt.gap_s.p50,
            "p99": lambda outcome: 1000 * outcome.mixture.rt.gap_s.p99,
        },
    ),
]
_BEST_EFFORT: list[_Panel] = [
    ("best effort, tokens/s", {"": lambda outcome: outcome.mixture.be.tokens_per_s})
]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws the rows to a PNG. Raises ValueError if none has results."""
    done = {str(row.setting): row.outcome for row in rows if row.outcome}
    if not done:
        raise ValueError("plot: there is nothing to draw")
    has_rt = any(outcome.mixture.rt.num_requests for outcome in done.values())
    has_be = any(outcome.mixture.be.num_requests for outcome in done.values())
    panels = (_REAL_TIME if has_rt else []) + (_BEST_EFFORT if has_be else [])
    size = _WIDTH_OF_PANEL * len(panels), _HEIGHT_OF_ROW * len(done) + _HEIGHT_OF_REST
    figure = figure_class()(figsize=size, layout="constrained")
    for axes, panel in zip(
        figure.subplots(1, len(panels), sharey=True, squeeze=False)[0], panels, strict=True
    ):
        _bars(axes, panel, done)
    figure.savefig(path, format="png", dpi=120)


def _bars(axes: Any, panel: _Panel, done: dict[str, TrialOutcome]) -> None:
    name, shown = panel
    height = 0.8 / len(shown)
    for index, (label, value) in enumerate(shown.items()):
        places = [place + height * (index - (len(shown) - 1) / 2) for place in range(len(done))]
        bars = axes.barh(places, [value(outcome) for outcome in done.values()], height)
        axes.bar_label(bars, fmt=f"{label} %.4g".lstrip(), padding=2, fontsize=7)
    axes.set_yticks(range(len(done)), list(done))
    if not axes.yaxis_inverted():
        axes.invert_yaxis()
    axes.margins(x=0.25)
    axes.set(title=name)
    axes.grid(axis="x", alpha=0.3)
