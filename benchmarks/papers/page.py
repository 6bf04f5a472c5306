"""The results as a page, and as a table for a terminal."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.papers import plots
from benchmarks.papers.catalogue import PAPERS
from benchmarks.papers.claim import Finding
from benchmarks.papers.datasets import ALL
from benchmarks.papers.verdict import ENOUGH, NOISE, Verdict

WIDTH = 60
HEAD = """# Five papers' figures, and ours

{commands}

{runs}

{counts}

**Reproduced** is a claim of which at least {enough:.0%} of the gain is there too, **partly** one with less of it, or
with some of its parts, and **refuted** one without any ({noise:.0%} either way are noise), or the reverse. Systems that
papers compare with are scheduling policies here, on the same simulated engine: vLLM is `fcfs` on colocated instances,
DistServe is `fcfs` apart, FastGen and Sarathi-Serve are `sarathi`. Where several seeds ran, ours are their medians.
With `--quick` it is a third of the requests and seconds that are named below.
"""


def write(findings: Sequence[Finding], runs: Sequence[Mapping[str, Any]], out: Path) -> None:
    out.joinpath("papers.md").write_text(markdown(findings, runs))
    plots.draw_all(findings, out)


def markdown(findings: Sequence[Finding], runs: Sequence[Mapping[str, Any]]) -> str:
    commands = "```sh\n" + "\n".join(str(run["command"]) for run in runs) + "\n```"
    said = "; ".join(
        f"{run['date']} at {str(run['commit'])[:12]}, {run['num_cpus']} cores, {run['minutes']} minutes"
        for run in runs
    )
    counts = Counter(finding.verdict for finding in findings)
    counted = "Of {} claims: {}.".format(
        len(findings), ", ".join(f"{counts[verdict]} {verdict}" for verdict in Verdict if counts[verdict])
    )
    head = HEAD.format(commands=commands, runs=f"{said}.", counts=counted, enough=ENOUGH, noise=NOISE)
    sections = [_section(name, findings) for name in PAPERS if any(each.paper == name for each in findings)]
    return "\n".join([head, "![Claims by verdict](papers.png)\n", *sections, _datasets()])


def _section(name: str, findings: Sequence[Finding]) -> str:
    some = [each for each in findings if each.paper == name]
    lines = [
        f"## {PAPERS[name].title}",
        "",
        "| claim | the paper | ours | verdict | why |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in some:
        cells = (each.text, each.figure, each.ours + _spread(each), f"**{each.verdict}**", each.reason)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    lines += ["", "How each was obtained:", ""]
    by_how: dict[str, list[str]] = {}
    for each in some:
        if each.how:
            by_how.setdefault(each.how, []).append(f"{each.text} ({each.setup})")
    lines += [f"- {how}. For: {'; '.join(names)}." for how, names in by_how.items()]
    return "\n".join([*lines, ""])


def _spread(finding: Finding) -> str:
    """Shows the range of the first number if there are several seeds."""
    values = next(iter(finding.numbers.values()), [])
    if len(values) < 2:
        return ""
    name = next(iter(finding.numbers))
    return f"; {name.replace('_', ' ')} by seed: {min(values):.2f} to {max(values):.2f}"


def _datasets() -> str:
    lines = [
        "## Made data",
        "",
        "No dataset is shipped. Lengths are drawn, log-normally unless it says otherwise:",
        "",
    ]
    lines += [f"- {each.name}: {each.source}." for each in ALL]
    return "\n".join([*lines, ""])


def terminal(findings: Sequence[Finding]) -> str:
    """Returns a table of claim, paper's figure, our figure and verdict, with the reason and the method below each
    row."""
    lines = []
    for each in findings:
        rows = [textwrap.wrap(text, WIDTH) or [""] for text in (each.text, each.figure, each.ours)]
        head = f"{each.paper}: "
        rows[0] = textwrap.wrap(head + each.text, WIDTH)
        for index in range(max(map(len, rows))):
            cells = [row[index] if index < len(row) else "" for row in rows]
            verdict = f" {each.verdict}" if not index else ""
            lines.append("  ".join(f"{cell:{WIDTH}}" for cell in cells) + verdict)
        for text in filter(None, (each.reason, each.how)):
            lines += textwrap.wrap(text, 3 * WIDTH, initial_indent="    ", subsequent_indent="    ")
        lines.append("")
    return "\n".join(lines)
