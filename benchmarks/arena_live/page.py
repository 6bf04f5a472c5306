"""The page: a row for each scenario and policy, live beside simulated."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.gpu.record import Row

_TIMES = ("ttft_p50_s", "ttft_p90_s", "gap_p50_s", "gap_p99_s")


def line(row: Row) -> str:
    scene = row["scene"]
    head = f"{scene['number']:3} {row['policy']:9} {scene['layout']:11} {scene['load']:.1f}"
    if "error" in row:
        return f"{head} FAILED {row['error'].strip().splitlines()[-1][:120]}"
    live, simulated = row["live"], row["simulated"]
    return (
        f"{head} {scene['objectives']:7} {scene['best_effort']:8} pace {row['pace']:.2f} "
        f"in time {100 * live['in_time']:.0f} | {100 * simulated['in_time']:.0f} %"
        f"  TTFT p50 {live['ttft_p50_s']:.2f} | {simulated['ttft_p50_s']:.2f} s"
        f"  BE {live['be_tokens_per_s']:.0f} | {simulated['be_tokens_per_s']:.0f} tokens/s"
    )


def write(path: Path) -> None:
    text = "\n".join(page(json.loads(path.read_text())))
    path.with_suffix(".md").write_text(text + "\n")


def page(record: dict[str, Any]) -> Iterator[str]:
    rows = [row for row in record["rows"] if "error" not in row]
    yield "# Scenarios live, and in simulation"
    yield f"\n```sh\n{record['command']}\n```\n"
    yield f"{record['date']}, {record['num_cpus']} cores of {record['processor']}. A cell has the live figure, then the"
    yield "simulated one. Times are in milliseconds at the router, real time's. Best effort is in output tokens per"
    yield "second while real time is there. Pace: how much longer iterations take than by the profile.\n"
    if rows:
        yield from _summary(rows)
        yield from _table(rows)
    for row in rows:
        if row.get("num_left_out"):
            scene = f"Scenario {row['scene']['number']}, {row['policy']}"
            yield f"\n{scene}: {row['num_left_out']} requests of real time left out"
    for row in record["rows"]:
        if "error" in row:
            yield f"\nNot measured: scenario {row['scene']['number']}, {row['policy']}: {row['error'].splitlines()[-1]}"


def _summary(rows: Sequence[Row]) -> Iterator[str]:
    apart = [100 * (row["simulated"]["in_time"] - row["live"]["in_time"]) for row in rows]
    yield f"- In time: live {100 * fmean(row['live']['in_time'] for row in rows):.1f} % on average, simulated"
    yield f"  {100 * fmean(row['simulated']['in_time'] for row in rows):.1f} %. They are apart by"
    yield f"  {median(map(abs, apart)):.1f} points at the median, and by {max(map(abs, apart)):.1f} at most."
    for name in _TIMES:
        ratios = [row["simulated"][name] / row["live"][name] for row in rows if row["live"][name]]
        yield f"- {_named(name)}, simulated to live: {median(ratios):.2f} at the median, {min(ratios):.2f} to"
        yield f"  {max(ratios):.2f}."
    beside = [row for row in rows if row["live"]["be_tokens_per_s"]]
    if beside:
        ratios = [row["simulated"]["be_tokens_per_s"] / row["live"]["be_tokens_per_s"] for row in beside]
        yield f"- Best effort: {median(ratios):.2f} at the median, {min(ratios):.2f} to {max(ratios):.2f}."


def _named(name: str) -> str:
    what, which, _ = name.split("_")
    return f"{'TTFT' if what == 'ttft' else 'Gaps'} {which}"


def _table(rows: Sequence[Row]) -> Iterator[str]:
    yield (
        "\n| scenario | policy | layout | load | objectives | best effort | requests | pace | in time, % "
        "| TTFT p50 | p90 | gap p50 | p99 | best effort/s |"
    )
    yield "| ---: | --- | --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in rows:
        scene, live, simulated = row["scene"], row["live"], row["simulated"]
        cells = [
            *(str(scene["number"]), f"`{row['policy']}`", scene["layout"], f"{scene['load']:g}"),
            *(scene["objectives"], scene["best_effort"], str(row["num_requests"])),
            f"{row['pace']:.2f}",
            f"{100 * live['in_time']:.0f}, {100 * simulated['in_time']:.0f}",
            *(f"{1e3 * live[name]:.0f}, {1e3 * simulated[name]:.0f}" for name in _TIMES),
            f"{live['be_tokens_per_s']:.0f}, {simulated['be_tokens_per_s']:.0f}",
        ]
        yield f"| {' | '.join(cells)} |"
