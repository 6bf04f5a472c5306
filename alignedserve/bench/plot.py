"""Draws a run: the distributions of TTFT and TPOT in each class, and attainment over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from alignedserve.bench.client import RequestOutcome
from alignedserve.bench.figure import figure_class
from alignedserve.bench.results import is_good, is_whole, times_of

# A share of fewer requests would jump between 0 and 1.
MAX_WINDOWS, LEAST_REQUESTS = 30, 20
COLORS = {"rt": "tab:blue", "be": "tab:orange"}
LABELS = {"rt": "real-time", "be": "best-effort"}


def draw(
    outcomes: Sequence[RequestOutcome],
    objectives_ms: Mapping[str, float],
    duration_s: float,
    title: str,
    path: Path,
) -> None:
    """Draws the run to a file. Raises ValueError if matplotlib is not installed."""
    figure = figure_class()(figsize=(11, 8), layout="constrained")
    figure.suptitle(title)
    ttft, tpot, attainment = figure.subplot_mosaic([["ttft", "tpot"], ["over time", "over time"]]).values()
    _distribution(ttft, outcomes, "ttft", objectives_ms.get("ttft"))
    _distribution(tpot, outcomes, "tpot", objectives_ms.get("tpot"))
    _over_time(attainment, outcomes, objectives_ms, duration_s)
    figure.savefig(path, format="png", dpi=120)


def _distribution(
    axes: Any, outcomes: Sequence[RequestOutcome], name: str, objective_ms: float | None
) -> None:
    for tier, color in COLORS.items():
        whole = [times_of(each) for each in outcomes if each.tier == tier and is_whole(each)]
        if whole:
            values = [getattr(each, name) * 1e3 for each in whole]
            axes.ecdf(values, color=color, label=f"{LABELS[tier]} ({len(values)})")
            axes.legend(loc="lower right")
    if objective_ms is not None:
        axes.axvline(objective_ms, color="tab:red", linestyle="--", linewidth=1)
    axes.set(title=name.upper(), xlabel="ms", ylabel="share of requests", ylim=(0, 1.02))
    axes.grid(alpha=0.3)


def _over_time(
    axes: Any, outcomes: Sequence[RequestOutcome], objectives_ms: Mapping[str, float], duration_s: float
) -> None:
    for tier, color in COLORS.items():
        points = attainment_over_time(outcomes, objectives_ms, duration_s, tier)
        if points:
            times, shares = zip(*points, strict=True)
            axes.plot(times, shares, color=color, marker=".", label=LABELS[tier])
            axes.legend(loc="lower left")
    what = " ".join(f"{name} ≤ {most:g} ms" for name, most in objectives_ms.items()) or "answered"
    axes.set(title=f"Attainment: {what}", xlabel="s", ylabel="share of requests", ylim=(-0.02, 1.02))
    axes.grid(alpha=0.3)


def attainment_over_time(
    outcomes: Sequence[RequestOutcome], objectives_ms: Mapping[str, float], duration_s: float, tier: str
) -> list[tuple[float, float]]:
    """Returns pairs of the middle of an interval and the share of the requests due in it that met their objectives."""
    of_tier = [each for each in outcomes if each.tier == tier]
    width_s = duration_s / min(max(len(of_tier) // LEAST_REQUESTS, 1), MAX_WINDOWS)
    windows: dict[int, list[bool]] = {}
    for each in of_tier:
        windows.setdefault(int(each.due_s / width_s), []).append(is_good(each, objectives_ms))
    return [((number + 0.5) * width_s, sum(kept) / len(kept)) for number, kept in sorted(windows.items())]
