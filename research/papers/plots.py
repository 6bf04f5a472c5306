"""The page's plot: which claims are reproduced, by paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from research.papers.catalogue import PAPERS
from research.papers.claim import Finding
from research.papers.verdict import Verdict

COLORS = {
    Verdict.REPRODUCED: "tab:green",
    Verdict.PARTLY: "tab:olive",
    Verdict.REFUTED: "tab:red",
}


def draw_all(findings: Sequence[Finding], out: Path) -> None:
    figure = Figure(figsize=(9, 3), layout="constrained")
    axes = figure.subplots()
    names = [name for name in PAPERS if any(each.paper == name for each in findings)]
    left = [0] * len(names)
    for verdict, color in COLORS.items():
        counts = [sum(each.paper == name and each.verdict is verdict for each in findings) for name in names]
        axes.barh(names, counts, left=left, color=color, label=str(verdict))
        left = [before + count for before, count in zip(left, counts, strict=True)]
    axes.invert_yaxis()
    axes.set(title="Claims")
    figure.legend(loc="outside right upper")
    figure.savefig(out / "papers.png", format="png", dpi=100)
