"""Turns records of `benchmarks.gpu.first` into a page.

    python -m benchmarks.gpu.first_page DIR/first.json ... --out benchmarks/results
    python -m benchmarks.gpu.first_page benchmarks/results/gpu_first.json --out benchmarks/results

Writes gpu_first.json, which has all runs without paths and long texts, and gpu_first.md. A case that several runs have
is shown as in the last run that measured it. A run's `notes`, which are added by hand, are printed with it.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.record import Row, is_measured, summary
from benchmarks.harness import FOLDER, parser_of, table

Run = dict[str, Any]

NAME = "gpu_first"
# Names left out of a machine's description, and out of a row.
LEFT_OUT, ROW_LEFT_OUT = ("changed_files",), ("failures", "prompts")
ENDS_WITH_ERROR = re.compile(r"\w+(?:Error|Exception|Interrupt): .*$")
KERNELS = ("balanced", "plain", "torch varlen", "torch SDPA", "copy")


# ---- the record ------------------------------------------------------------------------------------------------------


def runs_of(files: Sequence[Path]) -> list[Run]:
    """Returns the runs in records, and in files written by this program, without paths and long texts."""
    found: list[Run] = []
    for file in files:
        record = json.loads(file.read_text())
        found += record if isinstance(record, list) else [record]
    return [_short(run) for run in found]


def _short(run: Run) -> Run:
    head = {name: value for name, value in run.items() if name not in (*LEFT_OUT, "parts")}
    parts = [
        part
        | {"words": _error_of(part["words"]), "command": _without_out(part["command"])}
        | {"rows": [_short_row(row) for row in part["rows"]]}
        for part in run["parts"]
    ]
    return head | {"command": _without_out(run["command"]), "parts": parts}


def _short_row(row: Row) -> Row:
    """Keeps the last line of a traceback, and the names of failed tests."""
    short = {name: value for name, value in row.items() if name not in ROW_LEFT_OUT}
    if "error" in row:
        short["error"] = str(row["error"]).strip().rpartition("\n")[2]
    if "wrong" in row:
        short["wrong"] = [" ".join(str(what).split())[:120] for what in row["wrong"]]
        short["summary"] = str(row.get("summary", "")).partition("\n")[0]
    if "failures" in row:
        for what in ("passed", "failed", "skipped"):
            if what in short:
                short[f"num_{what}"] = short.pop(what)
        short["failed_tests"] = [name for name, _ in row["failures"]]
        short["summary"] = _counts(short)
    return short


def _counts(row: Row) -> str:
    counts = ((row.get(f"num_{what}", 0), what) for what in ("passed", "failed", "skipped"))
    return ", ".join(f"{count} {what}" for count, what in counts if count)


def _error_of(words: str) -> str:
    found = ENDS_WITH_ERROR.search(words)
    return found[0].rpartition("Traceback")[2] if found else ""


def _without_out(command: str | None) -> str | None:
    """Returns the command with DIR in place of its output directory."""
    if command is None:
        return None
    words = shlex.split(command)
    for option in ("--out", "--prepared", "--again"):
        if option in words and words[words.index(option) + 1].startswith("/"):
            words[words.index(option) + 1] = Path(words[words.index(option) + 1]).name
    if "--out" in words:
        words[words.index("--out") + 1] = "DIR"
    return shlex.join(words)


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """Returns the rows with the number of their run, and the part of `first` that they belong to as `asked`."""
    best: dict[tuple[str, ...], Row] = {}
    for number, run in enumerate(runs, 1):
        for part in run["parts"]:
            for row in part["rows"]:
                key = part["part"], row["part"], row["case"]
                if key not in best or _worth(row) >= _worth(best[key]):
                    best[key] = row | {"run": number, "asked": part["part"]}
    return list(best.values())


def _worth(row: Row) -> int:
    """A failure says more than a skipped case."""
    return 2 if is_measured(row) else int("error" in row)


# ---- the page --------------------------------------------------------------------------------------------------------


def markdown(runs: Sequence[Run]) -> str:
    rows = rows_of(runs)
    measured = [row for row in rows if is_measured(row)]
    sections = [_head(runs), _aims(measured)]
    for name, title, show in (
        ("kernels", "Kernels against their references", _kernels),
        ("serves", "It serves", _serves),
        ("correct", "Tokens equal to the CPU's", _correct),
        ("beside", "Real time beside best effort", _beside),
        ("step", "Decode steps", _steps),
        ("chunks", "Steps with a prompt's chunk", _chunks),
        ("attention", "Decode attention", _attention),
    ):
        if found := [row for row in measured if row["part"] == name and "per_s" not in row]:
            sections.append(f"## {title}\n\n{show(found)}")
    sections += [_not_run(rows), _parts(runs)]
    return "\n\n".join(section for section in sections if section) + "\n"


def _head(runs: Sequence[Run]) -> str:
    first = runs[0]
    names = ("driver", "torch", "triton", "transformers")
    about = ", ".join(f"{name} {first[name]}" for name in names if name in first)
    lines = [
        f"# One {first.get('device', 'machine')}: the worst questions first",
        "```sh\n" + "\n".join(run["command"] for run in runs),
    ]
    lines[-1] += "\n```"
    lines.append(
        f"{about}; {first.get('num_cpus', 'unknown')} CPU cores. Random weights; a time is a median. "
        "`benchmarks.gpu.first_page` "
        "makes this page of [gpu_first.json](gpu_first.json)."
    )
    lines.append("\n".join(_about(number, run) for number, run in enumerate(runs, 1)))
    return "\n\n".join(lines)


def _about(number: int, run: Run) -> str:
    notes = "".join(f" {note}" for note in run.get("notes", ()))
    return f"{number}. {run['date']} at {str(run['commit'])[:12]}.{notes}"


def _aims(rows: Sequence[Row]) -> str:
    """Uses the targets that are numbers."""
    found = list(_shares(rows)) + list(_milliseconds(rows)) + list(_ratios(rows))
    missed = [(what, value, aim) for what, value, aim, is_reached in found if not is_reached]
    said = f"{len(found) - len(missed)} of {len(found)} aims were reached."
    if not missed:
        return f"## Aims\n\n{said}"
    return f"## Aims\n\n{said} Those that were missed:\n\n" + table(("", "measured", "aim"), missed)


Aim = tuple[str, str, str, bool]


def _shares(rows: Sequence[Row]) -> list[Aim]:
    steps = [row for row in rows if row["part"] == "step" and "share" in row]
    found = [
        (
            f"decode step, share of the roofline: {row['case']}",
            f"{row['share']:.1%}",
            f"{row['aim']:.0%}",
            row["share"] >= row["aim"],
        )
        for row in steps
    ]
    for row in rows:
        if row["part"] == "attention" and "aim" in row:
            share = next(each["share"] for each in rows if each["case"] == f"{row['case']}: balanced")
            what = f"decode attention, share of a copy's bandwidth: {row['case']}"
            found.append((what, f"{share:.1%}", f"{row['aim']:.0%}", share >= row["aim"]))
    return found


def _milliseconds(rows: Sequence[Row]) -> list[Aim]:
    return [
        (
            f"chunk: {row['case']} (floor {row['roofline_s'] * 1e3:.1f} ms)",
            f"{row['median_s'] * 1e3:.1f} ms",
            f"{row['aim_ms']:g} ms",
            row["median_s"] * 1e3 <= row["aim_ms"],
        )
        for row in rows
        if row["part"] == "chunks" and row.get("aim_ms")
    ]


def _ratios(rows: Sequence[Row]) -> list[Aim]:
    found = []
    for row in rows:
        for name, aim in row["aims"].items() if "aims" in row else ():
            is_reached = row[name] >= aim if name.startswith("be_") else row[name] <= aim
            found.append(
                (
                    f"beside best effort, `{row['policy']}`: {RATIOS[name]}",
                    f"{row[name]:.2f}",
                    f"{aim:.2f}",
                    is_reached,
                )
            )
    return found


RATIOS = {
    "ttft_p50": "TTFT p50, times that of real time alone",
    "ttft_p99": "TTFT p99, times that of real time alone",
    "gap_p99": "p99 of gaps between pieces, times that of real time alone",
    "be_by_tokens": "share of best effort's tokens that are left over by real time's",
}


def _kernels(rows: Sequence[Row]) -> str:
    cells = [
        (
            f"`{row['case']}`",
            *(row.get(f"num_{what}", 0) for what in ("passed", "failed", "skipped")),
            row["run"],
        )
        for row in sorted(rows, key=lambda row: row["case"])
    ]
    total = ("all", *(sum(row[place] for row in cells) for place in (1, 2, 3)), "")
    return table(("tests", "passed", "failed", "skipped", "run"), [*cells, total])


def _took(seconds: float | None) -> str:
    return "not again" if seconds is None else f"{seconds:.1f}"


def _serves(rows: Sequence[Row]) -> str:
    cells = [
        (
            row["case"],
            *(row.get(name) for name in ("ready_s", "num_streams", "num_lines", "num_tokens")),
            ", ".join(f"{role} {_took(took_s)}" for role, took_s in row.get("killed", {}).items()),
            len(row["wrong"]),
        )
        for row in rows
    ]
    head = (
        "KV goes by",
        "ready after (s)",
        "streams",
        "lines of jobs",
        "tokens",
        "killed, and whole again after (s)",
        "wrong",
    )
    return table(head, cells)


def _correct(rows: Sequence[Row]) -> str:
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row["case"].partition(" ")[0], []).append(row)
    cells = []
    for model, found in by_model.items():
        exact = [row["is_equal"] for row in found if "bfloat16" not in row["case"]]
        close = [row["summary"] for row in found if "bfloat16" in row["case"]]
        cells.append((model, f"{sum(exact)} of {len(exact)}", *(close or ["not measured"])))
    said = "Ways: with either kernel of decode attention, in one go, in chunks, and preempted.\n\n"
    return said + table(
        (
            "small model of the family",
            "float32: ways with equal tokens",
            "bfloat16: in graphs, beside kernel by kernel",
        ),
        cells,
    )


def _beside(rows: Sequence[Row]) -> str:
    cells = [
        (
            row["case"],
            row["num_rt"],
            *(_ms(row[f"{what}_s"]) for what in ("ttft_p50", "ttft_p99", "gap_p50", "gap_p99")),
            f"{row['rt_tokens_per_s']:,.0f}",
            f"{row['be_tokens_per_s']:,.0f}",
            f"{row['busy']:.2f}",
        )
        for row in rows
        if "num_rt" in row
    ]
    head = (
        "case",
        "chats",
        "TTFT p50 (ms)",
        "p99",
        "gaps p50 (ms)",
        "p99",
        "real time (tokens/s)",
        "best effort (tokens/s)",
        "busy",
    )
    said = table(head, cells)
    ratios = [
        (what, value, aim, "reached" if is_reached else "missed")
        for what, value, aim, is_reached in _ratios(rows)
    ]
    return said + "\n\n" + table(("ratio", "measured", "aim", ""), ratios)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}" if seconds else ""


def _steps(rows: Sequence[Row]) -> str:
    cells = [
        (
            row["model"],
            f"{row['batch']} x {row['length']}",
            f"{row['median_s'] * 1e3:.2f}",
            f"{row['roofline_s'] * 1e3:.2f}",
            f"{row['share']:.1%}",
            f"{row['aim']:.0%}",
            "reached" if row["share"] >= row["aim"] else "missed",
        )
        for row in rows
    ]
    return table(("model", "batch x length", "ms", "roofline (ms)", "share", "aim", ""), cells)


def _chunks(rows: Sequence[Row]) -> str:
    cells = []
    for row in rows:
        aim_ms, took_ms = row.get("aim_ms"), row["median_s"] * 1e3
        said = ("", "") if not aim_ms else (f"{aim_ms:g}", "reached" if took_ms <= aim_ms else "missed")
        cells.append(
            (
                row["model"],
                row["count"],
                row["before"],
                f"{took_ms:.1f}",
                f"{row['roofline_s'] * 1e3:.1f}",
                f"{row['share']:.1%}",
                *said,
            )
        )
    return table(("model", "tokens", "after", "ms", "roofline (ms)", "share", "aim (ms)", ""), cells)


SHARED_HEAD = ("sequences", "balanced (µs)", "shared (µs)", "error of shared")


def _attention(rows: Sequence[Row]) -> str:
    """Shows microseconds, with the share of a copy's bandwidth."""
    found = {(row["mix"], row["kernel"]): row for row in rows if "kernel" in row}
    cells = []
    for row in rows:
        if "aim" in row:
            each = [found.get((row["case"], kernel)) for kernel in KERNELS]
            times = [f"{one['median_s'] * 1e6:.1f} ({one['share']:.1%})" if one else "" for one in each]
            cells.append((row["case"], *times, f"{row['aim']:.0%}", f"{row['error_of_balanced']:.1e}"))
    text = table(("lengths", *(f"{kernel} (µs)" for kernel in KERNELS), "aim", "error of balanced"), cells)
    common = [
        (
            row["case"],
            f"{row['alone_s'] * 1e6:.1f}",
            f"{row['shared_s'] * 1e6:.1f} ({row['copied_share']:.1%})",
            f"{row['error_of_shared']:.1e}",
        )
        for row in rows
        if "shared_s" in row
    ]
    return f"{text}\n\n{table(SHARED_HEAD, common)}" if common else text


def _not_run(rows: Sequence[Row]) -> str:
    cells = [(row["asked"], row["case"], summary(row), row["run"]) for row in rows if not is_measured(row)]
    return "## What did not run\n\n" + table(("part", "case", "why", "run"), cells) if cells else ""


def _parts(runs: Sequence[Run]) -> str:
    cells = [
        (number, part["part"], part["how"], part["took_s"] or "", part["words"])
        for number, run in enumerate(runs, 1)
        for part in run["parts"]
    ]
    return "## Parts\n\n" + table(("run", "part", "how it ended", "s", "why"), cells)


def write(files: Sequence[Path], out: Path) -> None:
    runs = runs_of(files)
    out.mkdir(parents=True, exist_ok=True)
    # Each row gets its own line, because rows are long and read one by one.
    (out / f"{NAME}.json").write_text(_text_of(runs))
    (out / f"{NAME}.md").write_text(markdown(runs))


def _text_of(runs: Sequence[Run]) -> str:
    return "[\n" + ",\n".join(_run_text(run) for run in runs) + "\n]\n"


def _run_text(run: Run) -> str:
    head = json.dumps({name: value for name, value in run.items() if name != "parts"}, indent=1)[:-2]
    return f'{head},\n "parts": [\n' + ",\n".join(map(_part_text, run["parts"])) + "\n]}"


def _part_text(part: dict[str, Any]) -> str:
    head = json.dumps({name: value for name, value in part.items() if name != "rows"})[:-1]
    rows = ",\n".join("  " + json.dumps(row) for row in part["rows"])
    return f'{head}, "rows": [\n{rows}\n]}}' if rows else f'{head}, "rows": []}}'


def main(arguments: Sequence[str] | None = None) -> None:
    parser = parser_of(__doc__, out=FOLDER | {"required": True})
    parser.add_argument("files", type=Path, nargs="+", metavar="JSON")
    args = parser.parse_args(arguments)
    write(args.files, args.out)


if __name__ == "__main__":
    main()
