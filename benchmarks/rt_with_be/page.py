"""Makes a page from the measurements: python -m benchmarks.rt_with_be.page JSON ... --out benchmarks/results

Writes rt_with_be.md, rt_with_be-*.png beside it and, from several files, one rt_with_be.json. A repeated part replaces
the earlier one of the same place and policy. Needs matplotlib.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from benchmarks.gpu.page import run, save
from benchmarks.harness import table
from benchmarks.rt_with_be import plots
from benchmarks.rt_with_be.arithmetic import (
    CONFIDENCE,
    LEAST_OF_BE,
    MOST_OF_RT,
    Row,
    Worth,
    interval,
    middle,
    worths,
)

PEER = (
    "\n\n`vllm` and `vllm-priority` are vLLM {version} for CPU with its fcfs and its priority scheduling. Its best "
    "effort is lines that a client keeps open, and its decode counts as busy while a request is open."
)
CASES = {"rt": "RT alone", "be": "BE alone", "mix": "RT with BE"}


def merged(files: Sequence[Path]) -> tuple[list[Row], list[Row]]:
    """Returns descriptions of the runs, and the rows. `run` in a row is the index of its run."""
    runs: list[Row] = []
    rows: dict[tuple[str, str | None, str], list[Row]] = {}
    for file in files:
        measured = json.loads(file.read_text())
        found: dict[tuple[str, str | None, str], list[Row]] = {}
        for row in measured.pop("rows"):
            found.setdefault((row["part"], row.get("place"), row["policy"]), []).append(
                row | {"run": len(runs) + row.get("run", 0)}
            )
        rows |= found
        runs += measured.pop("runs", None) or [measured]
    return runs, [row for some in rows.values() for row in some]


def markdown(runs: Sequence[Row], rows: Sequence[Row]) -> str:
    by_part: dict[str, list[Row]] = {}
    for row in rows:
        by_part.setdefault("error" if "error" in row else row["part"], []).append(row)
    sections = [_head(runs)] + [SECTIONS[part](some) for part, some in by_part.items()]
    return "\n\n".join(sections) + "\n"


def terminal_table(rows: Sequence[Row]) -> str:
    lines = [f"{'':34} {'TTFT p50':>9} {'TTFT p99':>9} {'TBT p99':>9} {'BE (a)':>7} {'BE (b)':>7}"]
    for (part, place, policy), each in worths(rows).items():
        ratios = middle(each)
        values = (ratios.ttft_p50, ratios.ttft_p99, ratios.gap_p99, ratios.be_by_time, ratios.be_by_tokens)
        widths = (9, 9, 9, 7, 7)
        written = " ".join(f"{number(value):>{width}}" for value, width in zip(values, widths, strict=True))
        lines.append(f"{f'{part} {place} {policy}':34} {written}")
    return "\n".join([*lines, f"aims: at most {MOST_OF_RT} for RT, at least {LEAST_OF_BE} for BE"])


def line(row: Row) -> str:
    """Returns one case as a line for the terminal."""
    name = " ".join(
        str(row[key]) for key in ("part", "place", "policy", "lengths", "case", "round") if key in row
    )
    return f"{name:40} " + "  ".join(_figures(row))


def _figures(row: Row) -> list[str]:
    if "error" in row:
        return ["FAILED " + row["error"].strip().splitlines()[0][:160]]
    figures = []
    if row.get("num_rt"):
        figures.append(f"TTFT {ms(row['ttft_p50_s'])} {ms(row['ttft_p99_s'])} ms")
        figures.append(f"TBT {ms(row['gap_p50_s'])} {ms(row['gap_p99_s'])} ms")
    if row.get("attainment") is not None:
        figures.append(f"kept {row['attainment']:.1%}")
    if "rt_per_s" in row:
        figures.append(f"RT {row['rt_per_s']:.2f}/s")
    if row.get("be_tokens_per_s"):
        figures.append(f"BE {row['be_tokens_per_s']:,.0f} tokens/s")
    if row.get("jobs_kept") is not None:
        figures.append(f"jobs {row['jobs_kept']:.1%}")
    if "num_needed" in row:
        figures.append(f"computed - needed {row['num_computed'] - row['num_needed']:,.0f}")
    if "num_sat_out" in row:
        figures.append(f"pauses {num_pauses(row)}")
    return figures


def num_pauses(row: Mapping[str, Any]) -> int:
    return int(row["num_evicted"] + row["num_sat_out"] + row["num_interrupted"])


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f}"


def number(value: float) -> str:
    if math.isnan(value):
        return "-"
    return f"{value:.2f}" if value < 100 else f"{value:,.0f}"


def _head(runs: Sequence[Row]) -> str:
    commands = "\n".join(run["command"] for run in runs)
    dates = "\n".join(f"- {run['date']} at {str(run['commit'])[:12]}" for run in runs)
    versions = {run["vllm"] for run in runs if run.get("vllm")}
    return (
        f"# Real time beside best effort, measured\n\n```sh\n{commands}\n```\n\n"
        f"These runs had {runs[0]['num_cpus']} cores:\n\n{dates}\n\n"
        "TTFT and the time between two tokens (TBT) are measured at the client. Ratios are taken within a round:\n\n"
        "| ratio | of | to | aim |\n| --- | --- | --- | --- |\n"
        f"| TTFT, TBT | RT with BE | RT alone | {MOST_OF_RT} at most |\n"
        "| BE (a) | BE with RT | BE alone, less the share of the decode instances' time that RT alone takes "
        f"| {LEAST_OF_BE} at least |\n"
        f"| BE (b) | BE with RT | BE alone, less RT's tokens | {LEAST_OF_BE} at least |"
        + "".join(PEER.format(version=version) for version in sorted(versions))
    )


def _ratios(title: str, picture: str) -> Callable[[Sequence[Row]], str]:
    def section(rows: Sequence[Row]) -> str:
        head = ("", "policy", "rounds", "TTFT p50", "TTFT p99", "TBT p99", "BE (a)", "BE (b)")
        cells = [_ratio_cells(place, policy, each) for (_, place, policy), each in worths(rows).items()]
        return (
            f"## {title}\n\nThis table has the medians of the rounds' ratios. With enough rounds, it has their "
            f"{CONFIDENCE:.0%} intervals too.\n\n{table(head, cells)}\n\n"
            f"Each case:\n\n{_cases(rows)}\n\n![]({picture})"
        )

    return section


def _ratio_cells(place: str, policy: str, each: Sequence[Worth]) -> Sequence[object]:
    ratios, ends = astuple(middle(each)), interval(each)
    if ends is None:
        return place, policy, len(each), *map(number, ratios)
    low, high = map(astuple, ends)
    values = [
        f"{number(value)} ({number(least)} to {number(most)})"
        for value, least, most in zip(ratios, low, high, strict=True)
    ]
    return place, policy, len(each), *values


def _cases(rows: Sequence[Row]) -> str:
    head = (
        *("", "policy", "round", "case", "requests", "TTFT p50, ms", "p99", "TBT p50, ms", "p99", "kept"),
        *("BE tokens/s", "decode busy", "evicted", "sat out", "interrupted"),
    )
    return table(head, [_case_cells(row) for row in rows])


def _case_cells(row: Row) -> Sequence[object]:
    times = [
        ms(row[name]) if row["num_rt"] else ""
        for name in ("ttft_p50_s", "ttft_p99_s", "gap_p50_s", "gap_p99_s")
    ]
    pauses = [
        f"{row[name]:.0f}" if name in row else ""
        for name in ("num_evicted", "num_sat_out", "num_interrupted")
    ]
    kept = "" if row["attainment"] is None else f"{row['attainment']:.1%}"
    be = f"{row['be_tokens_per_s']:,.0f}" if row["be_tokens_per_s"] else ""
    name = CASES.get(row["case"], row["case"])
    where = row["place"], row["policy"], row["round"], name
    return *where, row["num_rt"] or "", *times, kept, be, f"{row['busy']:.0%}", *pauses


def _bursts(rows: Sequence[Row]) -> str:
    head = ("", "policy", "RT requests", "kept", "TTFT p99, ms", "TBT p99, ms", "jobs kept", "BE tokens/s")
    cells = [
        (
            *(row["place"], row["policy"], row["num_rt"], f"{row['attainment']:.1%}"),
            *(
                ms(row["ttft_p99_s"]),
                ms(row["gap_p99_s"]),
                f"{row['jobs_kept']:.1%}",
                f"{row['be_tokens_per_s']:,.0f}",
            ),
        )
        for row in rows
    ]
    return (
        f"## RT in bursts, and jobs with windows, simulated\n\nGaps with a CV of 5.\n\n{table(head, cells)}"
    )


def _goodput(rows: Sequence[Row]) -> str:
    head = ("", "policy", "lengths known", "RT requests/s of which 90 % are kept", "BE tokens/s then")
    cells = [
        (
            row["place"],
            row["policy"],
            row["lengths"],
            f"{row['rt_per_s']:.2f}",
            f"{row['be_tokens_per_s']:,.0f}",
        )
        for row in rows
    ]
    title = "## Goodput beside all the BE that there is room for, simulated"
    return f"{title}\n\n{table(head, cells)}\n\n![](rt_with_be-goodput.png)"


def _exact(title: str) -> Callable[[Sequence[Row]], str]:
    def section(rows: Sequence[Row]) -> str:
        head = (
            *("", "policy", "evicted", "sat out", "interrupted", "tokens computed", "tokens needed"),
            "answers that differ",
        )
        cells = [
            (
                *(
                    row["place"],
                    row["policy"],
                    row["num_evicted"],
                    row["num_sat_out"],
                    row["num_interrupted"],
                ),
                *(f"{row['num_computed']:,.0f}", f"{row['num_needed']:,.0f}", row["num_different"]),
            )
            for row in rows
        ]
        return f"## {title}\n\n{table(head, cells)}"

    return section


def _failed(rows: Sequence[Row]) -> str:
    cells = [(row["part"], row["policy"], row["error"].strip().replace("\n", " ")[:200]) for row in rows]
    return f"## What did not run\n\n{table(('part', 'policy', 'why'), cells)}"


SECTIONS: dict[str, Callable[[Sequence[Row]], str]] = {
    "live": _ratios("The demo model, live", "rt_with_be-live.png"),
    "sim": _ratios("OPT-13B, simulated", "rt_with_be-sim.png"),
    "live_bursts": _ratios("RT in bursts, live", "rt_with_be-live_bursts.png"),
    "bursts": _bursts,
    "goodput": _goodput,
    "exact": _exact("Nothing recomputed, simulated"),
    "live_exact": _exact("Nothing recomputed, live"),
    "error": _failed,
}


def write(files: Sequence[Path], out: Path) -> None:
    runs, rows = merged(files)
    save(out / "rt_with_be.json", runs, rows)
    (out / "rt_with_be.md").write_text(markdown(runs, rows))
    plots.draw_all(rows, out)


if __name__ == "__main__":
    run(__doc__, write)
