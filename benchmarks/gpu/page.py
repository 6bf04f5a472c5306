"""Turns what was measured into a page: python -m benchmarks.gpu.page GPU_JSON ... --out benchmarks/results

Writes gpu.md, with gpu-*.png beside it, and from several files one gpu.json. If a case was measured several times, it
takes the last measurement that did not fail. Needs matplotlib.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import cost_fit, plots
from benchmarks.gpu.record import Row, is_measured, summary
from benchmarks.harness import FOLDER, parser_of, table

Table = Sequence[Sequence[object]]


def merged(files: Sequence[Path]) -> tuple[list[dict[str, Any]], list[Row]]:
    """Returns the descriptions of the machines, and the rows with `run` as the number of their machine."""
    machines: list[dict[str, Any]] = []
    rows: dict[tuple[str, str], Row] = {}
    for number, file in enumerate(files):
        measured = json.loads(file.read_text())
        found = measured.pop("rows")
        machines.append(measured)
        for row in found:
            key = row["part"], row["case"]
            if key not in rows or is_measured(row) or not is_measured(rows[key]):
                rows[key] = row | {"run": number}
    return machines, list(rows.values())


def markdown(machines: Sequence[dict[str, Any]], rows: Sequence[Row]) -> str:
    measured = [row for row in rows if is_measured(row)]
    parts = {part: [row for row in measured if row["part"] == part] for part in _in_order(measured)}
    sections = [_head(machines)]
    for part, found in parts.items():
        if part in SECTIONS:
            sections.append(SECTIONS[part](found))
        else:
            sections.append(_plain(part, found))
    failed = [row for row in rows if not is_measured(row)]
    if failed:
        cells = [(row["part"], row["case"], summary(row)) for row in failed]
        sections.append("## What did not run\n\n" + table(("part", "case", "why"), cells))
    return "\n\n".join(sections) + "\n"


def _in_order(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["part"] for row in rows))


def _head(machines: Sequence[dict[str, Any]]) -> str:
    first = machines[0]
    about = ", ".join(
        f"{name} {first[name]}" for name in ("driver", "torch", "triton", "transformers") if first.get(name)
    )
    commands = "\n".join(machine["command"] for machine in machines)
    dates = ", ".join(f"{machine['date']} at {str(machine['commit'])[:12]}" for machine in machines)
    return (
        f"# One {first['device']}, measured\n\n```sh\n{commands}\n```\n\n{about}. {dates}. Random weights; every "
        "number is a median; a share is of what this GPU was measured to do in the same run."
    )


def _ceilings(rows: Sequence[Row]) -> str:
    cells = [
        (
            f"`{row['case']}`",
            row["summary"],
            f"{row['min_s'] * 1e3:.3f} to {row['max_s'] * 1e3:.3f}",
            row["repeats"],
        )
        for row in rows
    ]
    return "## What this GPU can do\n\n" + table(("", "median", "ms, least to most", "repeats"), cells)


def _step(rows: Sequence[Row]) -> str:
    cells = [
        (
            row["model"],
            f"{row['batch']} x {row['length']}",
            f"{row['median_s'] * 1e3:.3f}",
            f"{row['busy_s'] * 1e3:.3f}" if "busy_s" in row else "",
            f"{row['roofline_s'] * 1e3:.3f}",
            f"{row['share']:.1%}",
            f"{row['aim']:.0%}",
        )
        for row in rows
        if "share" in row
    ]
    head = ("model", "batch", "ms a step", "GPU busy", "roofline", "share", "aim")
    return (
        "## A whole decode step\n\nFrom the call to tokens on the host. Roofline: all weights and all KV read once at "
        f"the copy's bandwidth, or the FLOPs at the product's rate.\n\n{table(head, cells)}\n\n![](gpu-step.png)"
    )


def _host_cost(rows: Sequence[Row]) -> str:
    cells = [
        (
            f"{row['model']}, batch {row['batch']}",
            f"{row['median_s'] * 1e3:.3f}",
            f"{(row['busy_s'] or 0) * 1e3:.3f}",
            f"{row['exposed_s'] * 1e3:.3f}",
            f"{row['aim_s'] * 1e3:.1f}",
        )
        for row in rows
    ]
    head = ("", "ms a step", "GPU busy", "not hidden", "aim")
    return f"## What the host adds\n\n{table(head, cells)}"


def _throughput(rows: Sequence[Row]) -> str:
    cells = [
        (
            row["case"],
            f"{row['output_tokens_per_s']:,.0f}",
            f"{row['tokens_per_s']:,.0f}",
            f"{row['seconds']:.1f}",
        )
        for row in rows
    ]
    head = ("", "output tokens/s", "all tokens/s", "seconds")
    return (
        "## Throughput\n\n256 requests at once, input and output lengths uniform in 100 to 1024, seed 0, no answer "
        f"stops early, max_model_len 4096.\n\n{table(head, cells)}"
    )


def _moves(rows: Sequence[Row]) -> str:
    plain = [row for row in rows if "save_share" in row]
    cells = [
        (
            row["case"],
            f"{row['save_per_s'] / 1e9:.1f} ({row['save_share']:.1%})",
            f"{row['load_per_s'] / 1e9:.1f} ({row['load_share']:.1%})",
            f"{row['both_per_s'] / 1e9:.1f}",
        )
        for row in plain
    ]
    head = ("", "GPU to host, GB/s", "host to GPU, GB/s", "both at once, together")
    text = f"## Moves of KV blocks\n\nShares are of one large pinned copy.\n\n{table(head, cells)}"
    for row in rows:
        if "slow_down" in row:
            text += f"\n\n{row['case']}: {row['summary']}."
    return text


def _cost_grid(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        error = cost_fit.fit_row(row, "")["error_on_held_out"]
        for kind in ("decode", "chunk", "both"):
            if f"{kind}_median" in error:
                worst = f"{error[f'{kind}_p95']:.1%}"
                cells.append(
                    (row["model"], kind, error[f"{kind}_points"], f"{error[f'{kind}_median']:.1%}", worst)
                )
    head = ("model", "kind", "held-out points", "median error", "p95")
    return f"## The cost model's fit\n\n{table(head, cells)}"


def _plain(part: str, rows: Sequence[Row]) -> str:
    cells = [(row["case"], summary(row)) for row in rows]
    text = f"## {part.capitalize()}\n\n{table(('case', ''), cells)}"
    return text + "\n\n![](gpu-attention.png)" if plots.has_mixes(rows) else text


SECTIONS = {
    "ceilings": _ceilings,
    "step": _step,
    "host_cost": _host_cost,
    "throughput": _throughput,
    "moves": _moves,
    "cost_grid": _cost_grid,
}


def run(description: str | None, write: Callable[[Sequence[Path], Path], None]) -> None:
    """The command line of a page: files in, a directory out."""
    parser = parser_of(description, out=FOLDER | {"required": True})
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    write(args.files, args.out)


def save(path: Path, runs: Any, rows: Sequence[Any]) -> None:
    """Writes each row on its own line, so that diffs are readable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ",\n".join(json.dumps(row) for row in rows)
    path.write_text(f'{{"runs": {json.dumps(runs, indent=1)},\n "rows": [\n{lines}\n]}}\n')


def write(files: Sequence[Path], out: Path) -> None:
    machines, rows = merged(files)
    save(out / "gpu.json", machines, rows)
    (out / "gpu.md").write_text(markdown(machines, rows))
    plots.draw_all([row for row in rows if is_measured(row)], out)


if __name__ == "__main__":
    run(__doc__, write)
